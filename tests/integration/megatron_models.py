"""Tiny Hugging Face folders with random weights, one per supported architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

# 101 is prime: the vocabulary must be padded under tensor parallelism.
_COMMON = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_MOE = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
# The 8 frequencies of a head lie in all three ranges of the scaling: kept, blended, divided.
_LLAMA3_ROPE = {
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama3_rope": ("Llama", {"tie_word_embeddings": False, **_LLAMA3_ROPE}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 32, "norm_topk_prob": True, **_MOE}),
}
NAMES = tuple(_MODELS)


def build(name: str, **overrides: Any) -> Any:
    """A transformers model with weights large enough for a wrong layout to show in the logits."""
    family, settings = _MODELS[name]
    config = getattr(transformers, f"{family}Config")(**_COMMON | settings | overrides)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        centre = 1.0 if "norm" in parameter_name else 0.0
        spread = 0.2 if "norm" in parameter_name else 0.08
        torch.nn.init.normal_(parameter, centre, spread)
    return model.eval()


def write(folder: Path, name: str, **overrides: Any) -> Path:
    """Saves build(name) under `folder`/`name` and returns that path."""
    path = folder / name
    build(name, **overrides).save_pretrained(path)
    return path
