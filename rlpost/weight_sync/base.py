"""The contract of a transport: how a policy version's tensors reach the engines.

The transaction (rlpost.weight_sync.transaction) owns order, deadlines and verification; a
transport only moves bytes. Every implementation passes tests/contract/test_weight_sync.py.
"""

from __future__ import annotations

from typing import Protocol

from rlpost.cluster.workers import Worker, WorkerGroup
from rlpost.engines.base import WeightChunk


class Transport(Protocol):
    """Moves one policy version from the actor's ranks to the engines."""

    async def prepare(
        self, trainer: WorkerGroup, *, dtype: str, deadline_s: float
    ) -> list[WeightChunk]:
        """Runs on the trainer while engines still generate; returns what was staged."""

    async def transfer(
        self, chunks: list[WeightChunk], engine: Worker, *, deadline_s: float
    ) -> None:
        """Loads the staged tensors into one paused engine."""

    async def release(self, chunks: list[WeightChunk]) -> None:
        """Frees what prepare() staged, after commit or failure."""
