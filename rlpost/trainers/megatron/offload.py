"""Moves tensors out of a GPU's memory and back without breaking the views between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Offloader:
    """Empties the storages under some tensors and fills them again.

    Megatron's parameters, optimizer shards and buckets are views of few large buffers; replacing
    tensors one by one would cut the optimizer off from the model it updates. Storages keep their
    identity, so all views stay views.
    """

    def __init__(self) -> None:
        self._parked: list[tuple[torch.UntypedStorage, torch.UntypedStorage | None, int]] = []

    def offload(self, kept: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor]) -> None:
        """`kept` comes back as it is, `scratch` (gradients) as zeros."""
        if self._parked:
            return
        saved = _storages(kept)
        for storage in saved.values():
            copy = _cpu_storage(storage.nbytes()).copy_(storage)
            self._parked.append((storage, copy, storage.nbytes()))
        for pointer, storage in _storages(scratch).items():
            if pointer not in saved:
                self._parked.append((storage, None, storage.nbytes()))
        for storage, _, _ in self._parked:
            storage.resize_(0)

    def onload(self) -> None:
        for storage, copy, num_bytes in self._parked:
            storage.resize_(num_bytes)
            storage.copy_(_cpu_storage(num_bytes) if copy is None else copy)
        self._parked = []


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _cpu_storage(num_bytes: int) -> torch.UntypedStorage:
    """Filled with zeros."""
    return torch.zeros(num_bytes, dtype=torch.uint8).untyped_storage()


def model_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def gradient_tensors(wrapped: Any) -> list[torch.Tensor]:
    """Gradient buffers of a Megatron DistributedDataParallel."""
    return [buffer.grad_data for buffer in wrapped.buffers + wrapped.expert_parallel_buffers]


def optimizer_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Master weights and moments."""
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            tensors += [value for value in state.values() if torch.is_tensor(value)]
    return tensors


def held_bytes(model: torch.nn.Module, wrapped: Any, optimizer: Any) -> dict[str, int]:
    """Of weights, gradients and optimizer. Master weights that are the weights count once."""
    weights = _storages(model_tensors(model))
    held = {"weights": sum(tensor.nbytes for tensor in model_tensors(model))}
    if optimizer is not None:
        held["gradients"] = sum(tensor.nbytes for tensor in gradient_tensors(wrapped))
        own = [
            tensor
            for tensor in optimizer_tensors(optimizer)
            if tensor.untyped_storage().data_ptr() not in weights
        ]
        held["optimizer"] = sum(tensor.nbytes for tensor in own)
    return held
