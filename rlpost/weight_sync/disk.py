"""Weights through safetensors files in a folder that trainer and engines both see.

For engines on machines that share a file system with the trainer, but no object store.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlpost.engines.base import TensorSpec, WeightChunk, WeightFile
from rlpost.errors import WeightSyncError

if TYPE_CHECKING:
    import torch

    from rlpost.cluster.workers import Worker, WorkerGroup


@dataclass(frozen=True)
class ToFolder:
    """Stage: writes the tensors of a chunk as one safetensors file."""

    folder: str

    def __call__(
        self, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], num_bytes: int
    ) -> WeightFile:
        from safetensors.torch import save_file

        path = Path(self.folder) / f"{uuid.uuid4().hex}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        # A copy each: the file format refuses tensors that share memory.
        named = {
            spec.name: tensor.cpu().contiguous().clone()
            for spec, tensor in zip(specs, tensors, strict=True)
        }
        save_file(named, path)
        return WeightFile(str(path))


@dataclass(frozen=True)
class DiskTransportConfig:
    """`folder`: a path that means the same place on the trainer's and the engines' machines."""

    folder: str


class DiskTransport:
    """Transport (see rlpost.weight_sync.base). A version's files are deleted after its push."""

    Config = DiskTransportConfig

    def __init__(self, config: DiskTransportConfig) -> None:
        self.config = config

    async def prepare(
        self, trainer: WorkerGroup, *, dtype: str, deadline_s: float
    ) -> list[WeightChunk]:
        stage = ToFolder(str(Path(self.config.folder).absolute()))
        ranks = await trainer.call("export_weights", dtype, stage, deadline_s=deadline_s)
        chunks = [chunk for rank in ranks for chunk in rank]
        if not chunks:
            raise WeightSyncError(f"no rank of {trainer.role} exported any weights")
        return chunks

    async def transfer(
        self, chunks: list[WeightChunk], engine: Worker, *, deadline_s: float
    ) -> None:
        await engine.call("load_weights", chunks, deadline_s=deadline_s)

    async def release(self, chunks: list[WeightChunk]) -> None:
        for chunk in chunks:
            Path(chunk.buffer.path).unlink(missing_ok=True)
        chunks.clear()
