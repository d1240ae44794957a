"""From step scores to advantages of steps, and to rewards of samples. Pure, plain numbers.

r_is: score of step s of sample i, NaN when missing: such a step has no process term (NaN here) and
enters no statistic. Groups go by id, so they may be ragged or interleaved. eps = 1e-6.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, PositiveFloat

EPS = 1e-6
Scores = tuple[float, ...]  # of the steps of one sample
Rule = Literal["min", "product", "last", "mean"]
Mode = Literal["step_normalized", "return_to_go", "progress", "aggregate"]


@dataclass(frozen=True)
class CreditConfig:
    """`coef` weighs the process term of the three modes that have one; the other keys belong to
    one mode each and are null elsewhere."""

    mode: Mode
    coef: PositiveFloat | None
    gamma: Annotated[float, Field(gt=0, le=1)] | None
    initial_value: FiniteFloat | None
    aggregate: Rule | None
    weight: Annotated[float, Field(gt=0, le=1)] | None

    def __post_init__(self) -> None:
        used = {
            "coef": self.mode != "aggregate",
            "gamma": self.mode == "return_to_go",
            "initial_value": self.mode == "progress",
            "aggregate": self.mode == "aggregate",
            "weight": self.mode == "aggregate",
        }
        for key, wanted in used.items():
            value = getattr(self, key)
            if wanted and value is None:
                raise ValueError(f"{key} is null but mode: {self.mode} needs it; give it a value")
            if not wanted and value is not None:
                raise ValueError(
                    f"{key} ({value}) has no effect with mode: {self.mode}; set {key}: null"
                )


def step_advantages(
    config: CreditConfig, scores: Sequence[Scores], group_ids: Sequence[str]
) -> tuple[Scores, ...]:
    """coef * A^process of every step, NaN where its score is missing; all NaN for `aggregate`."""
    if config.mode == "aggregate":
        return tuple((math.nan,) * len(steps) for steps in scores)
    assert config.coef is not None, "checked by Config"
    made = _process_terms(config, scores, group_ids)
    return tuple(tuple(config.coef * value for value in steps) for steps in made)


def _process_terms(
    config: CreditConfig, scores: Sequence[Scores], group_ids: Sequence[str]
) -> list[Scores]:
    if config.mode == "step_normalized":
        return step_normalized(scores, group_ids)
    if config.mode == "return_to_go":
        assert config.gamma is not None, "checked by Config"
        return return_to_go(scores, group_ids, gamma=config.gamma)
    assert config.initial_value is not None, "checked by Config"
    return [progress(steps, initial_value=config.initial_value) for steps in scores]


def step_normalized(scores: Sequence[Scores], group_ids: Sequence[str]) -> list[Scores]:
    """(r_is - mean) / (std + eps) within (group, step index); std is the population one.

    A constant bucket gives 0, a bucket of one keeps its raw score.
    """
    return _normalized(
        scores, [[(group, step) for step in range(len(s))] for s, group in _zip(scores, group_ids)]
    )


def return_to_go(
    scores: Sequence[Scores], group_ids: Sequence[str], *, gamma: float
) -> list[Scores]:
    """G_is = sum_{s' >= s} gamma^(s'-s) r_is', normalised over all steps of the group
    [DeepSeekMath, arXiv:2402.03300, section 4.1.3]. Missing scores add nothing to the sum."""
    returns = [_returns(steps, gamma) for steps in scores]
    return _normalized(returns, [[group] * len(s) for s, group in _zip(scores, group_ids)])


def _returns(scores: Scores, gamma: float) -> Scores:
    total, backwards = 0.0, []
    for score in reversed(scores):
        missing = math.isnan(score)
        total = gamma * total + (0.0 if missing else score)
        backwards.append(math.nan if missing else total)
    return tuple(reversed(backwards))


def progress(values: Scores, *, initial_value: float) -> Scores:
    """v_is - v_i,s-1, the first against `initial_value` [PAV, arXiv:2410.08146]; missing when
    either value is."""
    before = (initial_value, *values[:-1])
    return tuple(value - last for value, last in zip(values, before, strict=True))


def aggregated(scores: Scores, rule: Rule) -> float:
    """One number of a response, over the scores that are there; NaN when none is.

    `last` is the last step's own score: NaN when that one is missing.
    """
    known = [score for score in scores if not math.isnan(score)]
    if not known:
        return math.nan
    if rule == "last":
        return scores[-1]
    if rule == "min":
        return min(known)
    return math.prod(known) if rule == "product" else sum(known) / len(known)


def combined_reward(config: CreditConfig, reward: float, scores: Scores) -> float:
    """(1 - weight) * R + weight * aggregate; R as it is in the other modes. NaN when a part is."""
    if config.mode != "aggregate":
        return reward
    assert config.aggregate is not None and config.weight is not None, "checked by Config"
    process = config.weight * aggregated(scores, config.aggregate)
    return process if config.weight == 1 else (1 - config.weight) * reward + process


def _normalized(values: Sequence[Scores], buckets: Sequence[Sequence[Hashable]]) -> list[Scores]:
    """Each value against the present ones of its bucket."""
    members: dict[Hashable, list[float]] = defaultdict(list)
    for row, names in zip(values, buckets, strict=True):
        for value, name in zip(row, names, strict=True):
            if not math.isnan(value):
                members[name].append(value)
    return [
        tuple(_against(value, members[name]) for value, name in zip(row, names, strict=True))
        for row, names in zip(values, buckets, strict=True)
    ]


def _against(value: float, bucket: Sequence[float]) -> float:
    if math.isnan(value) or len(bucket) == 1:
        return value
    if max(bucket) == min(bucket):
        return 0.0
    mean = math.fsum(bucket) / len(bucket)
    std = math.sqrt(math.fsum((other - mean) ** 2 for other in bucket) / len(bucket))
    return (value - mean) / (std + EPS)


def _zip(scores: Sequence[Scores], group_ids: Sequence[str]) -> list[tuple[Scores, str]]:
    return list(zip(scores, group_ids, strict=True))
