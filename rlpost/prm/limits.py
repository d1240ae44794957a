"""What scorers share: limits of calls to engines, and rules of credit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rlpost.prm.credit import CreditConfig
from rlpost.rewards.budget import FailureBudget


@dataclass(frozen=True)
class LimitsConfig:
    """Of the calls that score one response: time, and how many may fail before the run stops."""

    deadline_s: PositiveFloat
    max_attempts: PositiveInt
    failure_window: PositiveInt
    max_failure_fraction: Annotated[float, Field(ge=0, le=1)]
    max_consecutive_failures: NonNegativeInt

    def conflicts(self, run: Any) -> Iterator[str]:
        """`run` is the whole RunConfig."""
        longest, limit = self.deadline_s * self.max_attempts, run.rollout.config.generate_deadline_s
        if longest > limit:
            yield (
                f"prm.limits.deadline_s ({self.deadline_s:g}) x max_attempts ({self.max_attempts}) "
                f"is more than rollout.generate_deadline_s ({limit:g}), the limit of a whole "
                "group; lower one or raise the other"
            )

    def budget(self, what: str) -> FailureBudget:
        return FailureBudget(
            what,
            window=self.failure_window,
            max_fraction=self.max_failure_fraction,
            max_consecutive=self.max_consecutive_failures,
        )


def refuse_progress(credit: CreditConfig | None, who: str) -> Iterator[str]:
    """Progress is a difference of values; a verdict on one step is none."""
    if credit is not None and credit.mode == "progress":
        yield (
            f"prm.credit.mode: progress takes differences of values (the chance of a right answer "
            f"after each step), but {who} judges each step by itself; choose prm=model, or mode "
            "step_normalized or return_to_go"
        )
