"""What transports share that stage all tensors first: in the object store, in files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rlpost.engines.base import Stage, WeightChunk
from rlpost.errors import WeightSyncError

if TYPE_CHECKING:
    from rlpost.cluster.workers import Worker, WorkerGroup


class StagedTransport(ABC):
    """Transport (see rlpost.weight_sync.base)."""

    @property
    @abstractmethod
    def stage(self) -> Stage:
        """Where the trainer's ranks put each chunk."""

    async def prepare(
        self, trainer: WorkerGroup, *, dtype: str, deadline_s: float
    ) -> list[WeightChunk]:
        ranks = await trainer.call("export_weights", dtype, self.stage, deadline_s=deadline_s)
        chunks = [chunk for rank in ranks for chunk in rank]
        if not chunks:
            raise WeightSyncError(f"no rank of {trainer.role} exported any weights")
        return chunks

    async def transfer(
        self, chunks: list[WeightChunk], engine: Worker, *, deadline_s: float
    ) -> None:
        await engine.call("load_weights", chunks, deadline_s=deadline_s)

    async def release(self, chunks: list[WeightChunk]) -> None:
        chunks.clear()
