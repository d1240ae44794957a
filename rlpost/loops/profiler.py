"""Profiles some steps in every process of the roles and engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rlpost.cluster.workers import Worker, gather
from rlpost.profiling import ProfileConfig, memory_table

DEADLINE_S = 600.0  # writing a trace of many steps takes its time


class Profiler:
    """Leaves profile/<role>-<rank>.json.gz and profile/memory.txt in the run's folder."""

    def __init__(
        self,
        config: ProfileConfig,
        workers: Sequence[Worker],
        run_dir: Path,
        keep: Callable[[Path], None],
    ) -> None:
        """`keep` hands a file to the trackers."""
        self._config = config
        self._workers = list(workers)
        self._folder = (run_dir / "profile").absolute()
        self._keep = keep
        self._running = False

    async def after(self, step: int) -> None:
        """Called when `step` steps are finished."""
        if step == self._config.first_step - 1:
            await gather(
                worker.start_profile(self._config, deadline_s=DEADLINE_S)
                for worker in self._workers
            )
            self._running = True
        elif step == self._config.last_step and self._running:
            await self._write()

    async def _write(self) -> None:
        traces = [self._folder / f"{worker.role}-{worker.rank}.json.gz" for worker in self._workers]
        peaks = await gather(
            worker.stop_profile(trace, deadline_s=DEADLINE_S)
            for worker, trace in zip(self._workers, traces, strict=True)
        )
        names = [f"{worker.role}-{worker.rank}" for worker in self._workers]
        table = self._folder / "memory.txt"
        table.write_text(memory_table(dict(zip(names, peaks, strict=True))))
        self._running = False
        for path in [table, *(traces if self._config.artifacts else [])]:
            self._keep(path)
