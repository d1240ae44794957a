"""What one engine allocates, by arithmetic; needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost.memory import MIB, WorkerMemory
from rlpost.models.base import Dtype
from rlpost.models.shape import DTYPE_BYTES, Cut, Head, ModelShape

if TYPE_CHECKING:
    from rlpost.engines.serving import ServingConfig

PROCESS_BYTES = 890 * MIB  # Python, torch, vLLM and Ray, as measured on a CPU
CONTEXT_BYTES = 1024 * MIB  # of CUDA and NCCL on the device
MAX_NUM_SEQS = 256  # vLLM's default
LOGITS_BYTES = 3 * 4  # of each logit while tokens are sampled: three copies in float32
DEFAULT_UTILIZATION = 0.92  # vLLM's default for gpu_memory_utilization


@dataclass(frozen=True, slots=True)
class EngineTask:
    """The model an engine serves. `device_bytes`: a GPU's whole memory, None where not known."""

    shape: ModelShape
    dtype: Dtype
    max_model_len: int
    head: Head
    device_bytes: int | None


def engine_memory(config: ServingConfig, task: EngineTask) -> WorkerMemory:
    """On each GPU of the engine; all ranks together on a CPU."""
    cut = Cut(tp=config.tensor_parallel_size)
    ranks = config.tensor_parallel_size if config.on_cpu else 1
    weights = task.shape.num_parameters(task.head, cut) * DTYPE_BYTES[task.dtype]
    parts = {"weights": ranks * weights}
    if task.head == "logits":
        running = int(config.vllm.get("max_num_seqs") or MAX_NUM_SEQS)
        parts["logits"] = running * task.shape.vocab_size * LOGITS_BYTES
    if config.on_cpu:
        parts["packed"] = packed_parameters(task.shape) * DTYPE_BYTES[task.dtype]
    else:
        parts["context"] = CONTEXT_BYTES
    kv_cache = kv_cache_bytes(config, task, taken=sum(parts.values()))
    if kv_cache is not None:
        parts["kv_cache"] = ranks * kv_cache
    return WorkerMemory(parts, {"process": ranks * PROCESS_BYTES}, on_gpu=not config.on_cpu)


def packed_parameters(shape: ModelShape) -> int:
    """Of the linear layers, which the CPU's kernels hold once more (see packing.py)."""
    lookup = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    sparse = shape.num_layers - len(shape.dense_layers) if shape.num_experts else 0
    experts = sparse * 3 * shape.hidden_size * shape.expert_size * shape.num_experts
    return shape.num_parameters() - lookup - experts


def kv_cache_bytes(config: ServingConfig, task: EngineTask, *, taken: int) -> int | None:
    """Of one rank: as given; on a GPU else what is left of the engine's share of its memory.

    None where vLLM decides and the memory is not known here.
    """
    given = config.vllm.get("kv_cache_memory_bytes")
    if given is not None:
        return int(given)
    if config.on_cpu or task.device_bytes is None:
        return None
    share = float(config.vllm.get("gpu_memory_utilization") or DEFAULT_UTILIZATION)
    return max(0, int(share * task.device_bytes) - taken)


def kv_cache_tokens(config: ServingConfig, task: EngineTask, num_bytes: int) -> int:
    """Tokens whose keys and values fit into `num_bytes` of one rank."""
    return num_bytes // kv_token_bytes(config, task)


def kv_token_bytes(config: ServingConfig, task: EngineTask) -> int:
    """Of one token on one rank; a rank holds at least one key head."""
    shape, tp = task.shape, config.tensor_parallel_size
    heads = -(-shape.num_key_value_heads // tp)
    return 2 * shape.num_layers * heads * shape.head_dim * DTYPE_BYTES[task.dtype]
