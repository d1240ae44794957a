"""Rewards run in a few processes of their own, each call under a limit."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rlpost.rewards.base import RewardInputs, StepInputs
from rlpost.rewards.budget import FailureBudget
from rlpost.rewards.process import RewardProcess
from rlpost.types import Verdict
from rlpost.validation import Section


@dataclass(frozen=True)
class PoolConfig:
    """`timeout_s` bounds a call, `start_timeout_s` building the rewards. Of each part's last
    `failure_window` calls `max_failure_fraction` may fail."""

    num_processes: PositiveInt
    timeout_s: PositiveFloat
    start_timeout_s: PositiveFloat
    failure_window: PositiveInt
    max_failure_fraction: Annotated[float, Field(ge=0, le=1)]
    max_consecutive_failures: NonNegativeInt


class RewardPool:
    """`score` asks every part; failures become verdicts until the budget of a part is spent.

    One thread drives one process. A process is replaced after a hang or a crash.
    """

    def __init__(self, config: PoolConfig, parts: Mapping[str, Section]) -> None:
        self._config = config
        self._parts = dict(parts)
        self._budgets = {name: self._budget(name) for name in parts}
        self._threads = ThreadPoolExecutor(config.num_processes, thread_name_prefix="reward")
        self._processes = [
            RewardProcess(parts, start_timeout_s=config.start_timeout_s)
            for _ in range(config.num_processes)
        ]
        self._free: queue.SimpleQueue[RewardProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._free.put(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self) -> None:
        """Builds the rewards in every process. Raises BudgetError with the reason if one fails."""
        loop = asyncio.get_running_loop()
        starts = [loop.run_in_executor(self._threads, one.start) for one in self._processes]
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, BaseException):
                await self.close()
                raise result

    async def score(self, inputs: RewardInputs | StepInputs) -> dict[str, Verdict]:
        """Part -> verdict. Raises BudgetError when a part fails too often."""
        loop = asyncio.get_running_loop()
        verdicts = await loop.run_in_executor(self._threads, self._judge_all, inputs)
        for part, verdict in verdicts.items():
            if verdict.status == "ok":
                self._budgets[part].succeeded()
            else:
                self._budgets[part].failed(
                    f"{verdict.status} on prompt {inputs.prompt.prompt_id!r}: {verdict.detail}"
                )
        return verdicts

    async def close(self) -> None:
        """Kills the processes; calls under way end with a verdict of status "error"."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _judge_all(self, inputs: RewardInputs | StepInputs) -> dict[str, Verdict]:
        process = self._free.get()  # never waits: as many processes as threads
        try:
            return {
                part: process.judge(part, inputs, timeout_s=self._config.timeout_s)
                for part in self._parts
            }
        finally:
            self._free.put(process)

    def _budget(self, part: str) -> FailureBudget:
        return FailureBudget(
            f"reward {part!r}",
            window=self._config.failure_window,
            max_fraction=self._config.max_failure_fraction,
            max_consecutive=self._config.max_consecutive_failures,
        )
