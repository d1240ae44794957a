"""Weights through the cluster's object store: written once by the trainer, read by every engine.

On one machine engines map the same shared memory. Other transports fit the same contract, because
a WeightChunk separates names, shapes and fingerprints from where the bytes lie:

* CUDA IPC (trainer and engine on one GPU): `prepare` stages the gathered tensors on the device and
  puts their IPC handles into `buffer`; `transfer` lets the engine's workers open the handles.
* NCCL: `prepare` only gathers names and shapes; `transfer` starts the broadcast on the exporting
  rank and the receive on the engine together; all engines are receivers of one broadcast, so the
  first call starts it and the others wait for it.

Both end in the same load in the worker, so verification does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlpost.engines.base import Stage, TensorSpec
from rlpost.types import BlockRef
from rlpost.weight_sync.staged import StagedTransport

if TYPE_CHECKING:
    import torch


def to_store(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], num_bytes: int
) -> BlockRef:
    """Stage: lays the tensors into one buffer and puts it into the object store."""
    import torch

    from rlpost.cluster import store

    buffer = np.zeros(num_bytes, dtype=np.uint8)
    for spec, tensor in zip(specs, tensors, strict=True):
        bits = tensor.contiguous().flatten().view(torch.uint8).cpu().numpy()
        buffer[spec.offset : spec.offset + len(bits)] = bits
    return store.put(buffer)


@dataclass(frozen=True)
class ObjectStoreTransportConfig:
    """Nothing to choose."""


class ObjectStoreTransport(StagedTransport):
    """The store frees a buffer when its last reference goes."""

    Config = ObjectStoreTransportConfig

    def __init__(self, config: ObjectStoreTransportConfig) -> None:
        self.config = config

    @property
    def stage(self) -> Stage:
        return to_store
