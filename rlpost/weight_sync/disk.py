"""Weights through safetensors files in a folder that trainer and engines both see.

For engines on machines that share a file system with the trainer, but no object store.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlpost.engines.base import Stage, TensorSpec, WeightChunk, WeightFile
from rlpost.weight_sync.staged import StagedTransport

if TYPE_CHECKING:
    import torch


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


class DiskTransport(StagedTransport):
    """A version's files are deleted after its push."""

    Config = DiskTransportConfig

    def __init__(self, config: DiskTransportConfig) -> None:
        self.config = config

    @property
    def stage(self) -> Stage:
        return ToFolder(str(Path(self.config.folder).absolute()))

    async def release(self, chunks: list[WeightChunk]) -> None:
        for chunk in chunks:
            Path(chunk.buffer.path).unlink(missing_ok=True)
        await super().release(chunks)
