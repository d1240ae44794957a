"""Tiny model folders, weight chunks of them, and what transformers says about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpost.engines.base import TensorSpec, WeightChunk
from rlpost.engines.vllm import VllmEngineConfig
from rlpost.fingerprint import fingerprint
from rlpost.types import GenerateRequest, Sampling

EOS = 1
VOCAB = 100  # vLLM pads it to 128
MAX_LEN = 160


def qwen2_folder(path: Path, *, seed: int) -> Path:
    """Dense, tied embeddings, biases, grouped-query attention."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**_sizes(), tie_word_embeddings=True)
    return _save(Qwen2ForCausalLM, config, path, seed)


def qwen3_moe_folder(path: Path, *, seed: int) -> Path:
    """Four experts, tied embeddings, query/key norms."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_sizes(),
        tie_word_embeddings=True,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    )
    return _save(Qwen3MoeForCausalLM, config, path, seed)


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def _save(cls: type[Any], config: Any, path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = cls(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def chunks_of(
    tensors: Mapping[str, torch.Tensor], put: Callable[[Any], Any], *, num_chunks: int = 2
) -> list[WeightChunk]:
    names = list(tensors)
    size = max(1, -(-len(names) // num_chunks))
    return [
        _chunk({name: tensors[name] for name in names[low : low + size]}, put)
        for low in range(0, len(names), size)
    ]


def _chunk(tensors: Mapping[str, torch.Tensor], put: Callable[[Any], Any]) -> WeightChunk:
    specs, parts, offset = [], [], 0
    for name, tensor in tensors.items():
        data = tensor.contiguous().flatten().view(torch.uint8).numpy()
        padded = np.zeros(-(-len(data) // 64) * 64, dtype=np.uint8)
        padded[: len(data)] = data
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, dtype, tuple(tensor.shape), offset))
        parts.append(padded)
        offset += len(padded)
    prints = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    return WeightChunk(tuple(specs), put(np.concatenate(parts)), prints)


def hf_logprobs(
    folder: Path, token_ids: Sequence[int], *, temperature: float = 1.0
) -> torch.Tensor:
    """log p(token_t | before) for t >= 1, by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(list(map(int, token_ids)))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def request(
    name: str,
    *,
    tokens: Sequence[int] = tuple(range(5, 45)),
    seed: int = 7,
    max_tokens: int = 24,
    temperature: float = 1.0,
) -> GenerateRequest:
    sampling = Sampling(temperature=temperature, top_p=1.0, max_tokens=max_tokens)
    return GenerateRequest(name, tuple(tokens), sampling, seed)


def engine_config(**changes: Any) -> VllmEngineConfig:
    values: dict[str, Any] = {
        "num_engines": 1,
        "tensor_parallel_size": 1,
        "process_layout": "auto",
        "num_cpus_per_engine": 1.0,
        "num_gpus_per_engine": 0.0,
        "threads_per_engine": 1,
        "start_deadline_s": 240.0,
        "vllm": {"enforce_eager": True, "kv_cache_memory_bytes": 16 << 20, "block_size": 32},
    }
    return VllmEngineConfig(**{**values, **changes})


def engine_context(folder: Path, *, rank: int = 0) -> dict[str, Any]:
    return {
        "model_path": str(folder),
        "dtype": "float32",
        "max_model_len": MAX_LEN,
        "rank": rank,
        "seed": 0,
    }
