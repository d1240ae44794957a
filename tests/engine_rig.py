"""Tiny model folders, weight chunks of them, and what transformers says about them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlpost.cluster.local import LocalCluster, LocalClusterConfig
from rlpost.cluster.workers import Placement, Worker, gather
from rlpost.engines.base import Stage, TensorSpec, WeightChunk
from rlpost.engines.vllm import VllmEngine, VllmEngineConfig
from rlpost.fingerprint import fingerprint
from rlpost.types import GenerateRequest, Generation, Sampling
from rlpost.validation import Section
from rlpost.weight_sync.object_store import (
    ObjectStoreTransport,
    ObjectStoreTransportConfig,
)
from rlpost.weight_sync.transaction import WeightSync, WeightSyncConfig

EOS = 1
VOCAB = 100  # vLLM pads it to 128
MAX_LEN = 500


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
    tensors: Mapping[str, torch.Tensor], stage: Stage, *, num_chunks: int = 2
) -> list[WeightChunk]:
    names = list(tensors)
    size = max(1, -(-len(names) // num_chunks))
    return [
        _chunk({name: tensors[name] for name in names[low : low + size]}, stage)
        for low in range(0, len(names), size)
    ]


def _chunk(tensors: Mapping[str, torch.Tensor], stage: Stage) -> WeightChunk:
    specs, offset = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, dtype, tuple(tensor.shape), offset))
        offset += -(-tensor.nbytes // 64) * 64
    prints = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    return WeightChunk(tuple(specs), stage(specs, list(tensors.values()), offset), prints)


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
        "vllm": {
            "enforce_eager": True,
            "kv_cache_memory_bytes": 16 << 20,
            "block_size": 32,
            "enable_prefix_caching": True,
        },
    }
    return VllmEngineConfig(**{**values, **changes})


def engine_context(folder: Path, *, rank: int = 0, dtype: str = "float32") -> dict[str, Any]:
    return {
        "model_path": str(folder),
        "dtype": dtype,
        "max_model_len": MAX_LEN,
        "role": "engine",
        "rank": rank,
        "seed": 0,
    }


@contextlib.contextmanager
def running_engines(
    log_dir: Path, engines: Sequence[tuple[Path, VllmEngineConfig, str]]
) -> Iterator[list[Worker]]:
    """Started engines (folder, config, dtype), each in its own worker of a small cluster."""
    cluster = LocalCluster(
        LocalClusterConfig(
            num_cpus=len(engines),
            num_gpus=0,
            object_store_bytes=80 << 20,
            start_deadline_s=60.0,
            cores={},
        ),
        log_dir=log_dir,
    )

    async def start(rank: int) -> Worker:
        folder, config, dtype = engines[rank]
        worker = cluster.spawn(role="engine", rank=rank, placement=Placement(1, 0, config.env))
        context = engine_context(folder, rank=rank, dtype=dtype)
        await worker.create(VllmEngine, [config], context, deadline_s=90.0)
        await worker.call("start", deadline_s=240.0)
        return worker

    async def start_all() -> list[Worker]:
        return await gather(start(rank) for rank in range(len(engines)))

    with cluster.running():
        yield asyncio.run(start_all())


class FolderTrainer:
    """Stands for the actor's ranks: exports the tensors of a model folder."""

    role = "actor"

    def __init__(self, folder: Path) -> None:
        self.tensors = tensors_of(folder)

    async def call(
        self, method: str, dtype: str, stage: Stage, *, deadline_s: float
    ) -> list[list[WeightChunk]]:
        assert method == "export_weights"
        cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in self.tensors.items()}
        return [chunks_of(cast, stage), []]


async def push(
    engines: list[Worker], folder: Path, version: int, *, dtype: str = "float32"
) -> None:
    """A full weight update from a model folder."""
    config = WeightSyncConfig(
        transport=Section("", ObjectStoreTransport, ObjectStoreTransportConfig()),
        dtype=dtype,
        pause="keep",
        verify="full",
        verify_fraction=1.0,
        prepare_deadline_s=60.0,
        pause_deadline_s=60.0,
        transfer_deadline_s=60.0,
        verify_deadline_s=60.0,
        commit_deadline_s=60.0,
    )
    trainer: Any = FolderTrainer(folder)
    await WeightSync(config).push(version, trainer, engines, full=True)


async def generate(engine: Worker, requests: Sequence[GenerateRequest]) -> list[Generation]:
    await engine.call("submit", list(requests), deadline_s=60.0)
    names = [item.request_id for item in requests]
    return await engine.call("collect", names, deadline_s=60.0)


def distance_to_hf(folder: Path, asked: GenerateRequest, answer: Generation) -> float:
    """Largest difference between the engine's log-probs and those of transformers."""
    ids = [*asked.token_ids, *answer.token_ids.tolist()]
    expected = hf_logprobs(folder, ids, temperature=asked.sampling.temperature)
    found = torch.from_numpy(answer.logprobs.copy())
    return float((expected[len(asked.token_ids) - 1 :] - found).abs().max())
