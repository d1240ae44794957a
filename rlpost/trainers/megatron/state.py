"""Saving and restoring a rank's weights, optimizer, schedule and RNG (Megatron's format)."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch.distributed.checkpoint.api import CheckpointException

from rlpost.errors import CheckpointError
from rlpost.trainers.megatron import device
from rlpost.trainers.megatron.layout import Layout
from rlpost.trainers.megatron.optimizer import unshare_steps
from rlpost.trainers.megatron.saving import InProcessSave


@dataclass(frozen=True)
class Counters:
    """Optimizer steps applied (the schedule's position) and skipped since the run began."""

    applied_steps: int
    skipped_steps: int


def save(path: Path, *, model: GPTModel, optimizer: Any, counters: Counters) -> None:
    """All ranks call. `optimizer` None saves weights and RNG alone. Raises CheckpointError."""
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    content = _content(model, optimizer, loading=False)
    content["counters"] = asdict(counters)
    dist_checkpointing.save(content, str(path), sharded_strategy=InProcessSave())
    dist.barrier()


def load(path: Path, *, model: GPTModel, optimizer: Any) -> Counters:
    """All ranks call. Raises CheckpointError. Continues bit by bit as the saving ranks would."""
    if not (path / "metadata.json").is_file():
        raise CheckpointError(f"{path} holds no trainer state (metadata.json is missing)")
    try:
        state = dist_checkpointing.load(_content(model, optimizer, loading=True), str(path))
    except (
        CheckpointingException,
        CheckpointException,
        OSError,
        EOFError,
        pickle.UnpicklingError,
        KeyError,
    ) as error:
        raise CheckpointError(
            f"{path} can't be loaded into this model and parallel layout: {error!r}"
        ) from error
    model.load_state_dict(state["model"], strict=True)
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        unshare_steps(optimizer)
    _set_rng(state["rng"])
    return Counters(**state["counters"])


def _content(model: GPTModel, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    metadata = {
        # The default type is refused by Megatron 0.16 without Transformer Engine.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    weights = _sharded_weights(model, metadata)
    content = {"model": weights, "rng": _sharded_rng()}
    if optimizer is not None:
        content["optimizer"] = optimizer.sharded_state_dict(
            weights, is_loading=loading, metadata=metadata
        )
    return content


def _sharded_weights(model: GPTModel, metadata: dict[str, Any]) -> dict[str, Any]:
    """LanguageModule's version takes the output layer for a vocabulary; a linear head is none."""
    head = getattr(model, "output_layer", None)
    if head is None or isinstance(head, ColumnParallelLinear):
        return model.sharded_state_dict(metadata=metadata)  # type: ignore[no-any-return]
    return super(LanguageModule, model).sharded_state_dict(metadata=metadata)  # type: ignore[no-any-return]


def _sharded_rng() -> ShardedObject:
    """One state for each rank: (stage, tensor rank, data rank)."""
    layout = Layout.read()
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    state = {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if device.has_cuda() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject(
        "rng",
        state,
        (layout.num_stages, tensor_size, layout.data_size),
        (layout.stage, layout.tensor_rank, layout.data_rank),
        replica_id=0,
    )


def _set_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and device.has_cuda():
        torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def parameters_hash(model: GPTModel) -> str:
    """sha256 over names and bits of this rank's parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        bits = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(bits.numpy().tobytes())
    return digest.hexdigest()
