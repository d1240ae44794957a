"""The good runs that many tests look at: each is launched once."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from whole_run import GRPO, WholeRun

AT_ONCE = 2  # a start is mostly imports on one core

SCENARIOS = {
    "sync": ["checkpoint.save_interval=5"],
    "colocated": ["loop.colocate=true"],
    "async without lookahead": ["loop=async", "loop.lookahead=0"],
    "fully async without staleness": ["loop=fully_async", "loop.max_staleness=0"],
    "async": ["loop=async", "engine.num_engines=2", "num_steps=4"],
    "fully async": ["loop=fully_async", "num_steps=4"],
    "dynamic sampling": [
        "algorithm=dapo",
        "algorithm.kl_coef=0.05",
        "rollout.temperature=0.7",
        "reward.parts.own.function._target_=own_rewards.Parity",
        "num_steps=3",
    ],
}


class Runs:
    """`start` begins a run in the background, `get` waits for its end and wants it to be good."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._futures: dict[str, Future[WholeRun]] = {}
        self._runs: list[WholeRun] = []

    def start(self, name: str) -> None:
        if name not in self._futures:
            self._futures[name] = self._pool.submit(self._launch, name)

    def get(self, name: str) -> WholeRun:
        self.start(name)
        return self._futures[name].result()

    def _launch(self, name: str) -> WholeRun:
        if name == "resumed":
            before = self.get("sync")
            return self._run(before.output_dir, f"resume_from={before.checkpoint(5)}")
        return self._run(self._folder / name.replace(" ", "-"), *SCENARIOS[name])

    def _run(self, output_dir: Path, *overrides: str) -> WholeRun:
        run = WholeRun(output_dir, *GRPO, *overrides)
        self._runs.append(run)
        return run.finished()

    def end(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for run in self._runs:
            run.end()
