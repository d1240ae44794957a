"""The rewards of a run, weighted into one number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlpost.rewards.base import RewardInputs
from rlpost.rewards.pool import PoolConfig, RewardPool
from rlpost.types import Verdict
from rlpost.validation import Section


@dataclass(frozen=True)
class PartConfig:
    weight: float
    function: Section


@dataclass(frozen=True)
class RewardSetConfig:
    """`accuracy` names the part whose full marks count as a right answer."""

    parts: dict[str, PartConfig]
    accuracy: str
    pool: PoolConfig

    def __post_init__(self) -> None:
        if self.accuracy not in self.parts:
            raise ValueError(
                f"accuracy ({self.accuracy!r}) must name one of the parts: {sorted(self.parts)}"
            )
        if not any(part.weight for part in self.parts.values()):
            raise ValueError(
                f"every weight of parts {sorted(self.parts)} is 0, so nothing would be rewarded; "
                "give at least one a weight"
            )


@dataclass(frozen=True, slots=True)
class Score:
    """`total` and `accuracy` are NaN when a verdict they need is missing."""

    total: float
    accuracy: float
    verdicts: Mapping[str, Verdict]


class RewardSet:
    """total = sum(weight * value). A part of weight 0 is measured only, and may be missing."""

    Config = RewardSetConfig

    def __init__(self, config: RewardSetConfig) -> None:
        self._config = config
        functions = {name: part.function for name, part in config.parts.items()}
        self._pool = RewardPool(config.pool, functions)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self._config.parts)

    async def start(self) -> None:
        await self._pool.start()

    async def score(self, inputs: RewardInputs) -> Score:
        """Raises BudgetError when a part fails too often."""
        verdicts = await self._pool.score(inputs)
        return Score(self._total(verdicts), self._accuracy(verdicts), verdicts)

    async def close(self) -> None:
        await self._pool.close()

    def _total(self, verdicts: Mapping[str, Verdict]) -> float:
        weights = {name: part.weight for name, part in self._config.parts.items() if part.weight}
        return sum(weight * value_of(verdicts[name]) for name, weight in weights.items())

    def _accuracy(self, verdicts: Mapping[str, Verdict]) -> float:
        """1.0 for full marks (1.0 or more) of the accuracy part, else 0.0: part marks are wrong."""
        value = value_of(verdicts[self._config.accuracy])
        return math.nan if math.isnan(value) else float(value >= 1.0)


def value_of(verdict: Verdict) -> float:
    """NaN when missing."""
    return math.nan if verdict.value is None else verdict.value
