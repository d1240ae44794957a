"""What a step leaves behind: its metrics, its samples, and once the memory that was measured."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlpost.loops import report
from rlpost.loops.batches import Batch
from rlpost.loops.draws import DrawBudgetError

if TYPE_CHECKING:
    from rlpost.cluster.workers import Worker
    from rlpost.data.ledger import Ledger
    from rlpost.loops.memory_report import MemoryReport
    from rlpost.tracking.recorder import Recorder


@dataclass
class Records:
    """`worker` writes the samples files; each write has `deadline_s`.

    One task: the write of a step's samples runs beside the next step. It is awaited before the next
    write and by `wait_for_samples`, and given up by `close`.
    """

    recorder: Recorder
    ledger: Ledger
    worker: Worker
    deadline_s: float
    memory: MemoryReport | None  # None once it was measured
    _writing: asyncio.Task[Any] | None = None

    def rollouts(self, batch: Batch) -> None:
        """Of the groups that were made, trained and dropped ones. Raises AssertionError if the
        ledger has lost a prompt."""
        self.ledger.check()
        self.recorder.add(report.rollout_metrics(batch) | report.ledger_metrics(self.ledger))
        self.recorder.add_time("generate", batch.generate_s)
        self.recorder.add_time("reward", batch.reward_s)
        generated = report.generated_tokens(batch)
        self.recorder.add({"perf/generated_tokens": float(generated)})
        self.recorder.rate("perf/generated_tokens_per_s", generated, "generate")

    def training(
        self, metrics: Mapping[str, float], *, staleness: float, policy_version: int
    ) -> None:
        trained = metrics.get("perf/trained_tokens", 0.0)
        position = {
            "policy/version": float(policy_version),
            "policy/staleness/max": staleness,
            "perf/trained_tokens": trained,
        }
        self.recorder.add({**metrics, **position})
        self.recorder.rate("perf/trained_tokens_per_s", trained, "train")

    async def samples(self, batch: Batch, reason: str = "trained") -> None:
        """Begins to write the step's samples; those of the step before have to be written."""
        await self.wait_for_samples()
        entries = [(group, reason) for group in batch.groups] + list(batch.dropped)
        call = self.worker.call(
            "write_samples",
            batch.step + 1,
            entries,
            tuple(block.ref for block in batch.blocks),
            deadline_s=self.deadline_s,
        )
        self._writing = asyncio.ensure_future(call)

    async def wait_for_samples(self) -> None:
        if self._writing is not None:
            await self._writing
            self._writing = None

    @contextlib.asynccontextmanager
    async def keeping_dropped(self) -> AsyncIterator[None]:
        """Where a batch can't be filled, what was dropped is written all the same: it says why."""
        try:
            yield
        except DrawBudgetError as error:
            await self.samples(error.batch)
            await self.wait_for_samples()
            raise

    async def measure_memory(self) -> None:
        """Once, after the first step."""
        if self.memory is not None:
            self.recorder.add(await self.memory.measure())
            self.memory = None

    async def close(self) -> None:
        """Gives up samples that are being written."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
