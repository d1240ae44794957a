"""Steps scored by a program, in the processes that run rewards, under the same kinds of limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlpost.prm.base import Response, Services
from rlpost.prm.credit import CreditConfig
from rlpost.prm.limits import refuse_progress
from rlpost.prm.steps import StepsConfig
from rlpost.rewards.pool import PoolConfig, RewardPool
from rlpost.validation import Section

PART = "prm"


@dataclass(frozen=True)
class VerifierPrmConfig:
    """`program` is a StepProgram."""

    credit: CreditConfig | None
    steps: StepsConfig
    program: Section
    pool: PoolConfig

    def conflicts(self, run: Any) -> Iterator[str]:
        if not getattr(self.program.target, "gives_values", False):
            yield from refuse_progress(self.credit, self.program.target.__name__)


class VerifierPrm:
    """StepScorer. A failed or late program leaves all steps of its response missing."""

    Config = VerifierPrmConfig

    def __init__(self, config: VerifierPrmConfig, *, services: Services) -> None:
        self._pool = RewardPool(config.pool, {PART: config.program})

    async def start(self) -> None:
        await self._pool.start()

    async def score(self, response: Response) -> list[float]:
        verdict = (await self._pool.score(response.inputs))[PART]
        return list(verdict.steps) if verdict.status == "ok" else missing(response)

    async def close(self) -> None:
        await self._pool.close()


def missing(response: Response) -> list[float]:
    return [math.nan] * len(response.ends)
