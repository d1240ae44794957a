"""Metric values that know how they reduce across micro-batches and ranks. No sinks here.

Names are `area/name/stat`, e.g. `rollout/reward/mean`, `time/train_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Reduce = Literal["mean", "exp_mean", "sum", "step_mean", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A partial metric: `mean` carries (sum, count), so merging is exact for unequal parts.

    `exp_mean` is exp of such a mean (perplexity), taken after all parts are merged. `step_mean`
    is a sum over the parts of one optimizer step, and a mean over steps (see `over_steps`).
    """

    reduce: Reduce
    value: float
    count: float = 1.0

    def merge(self, other: Metric) -> Metric:
        if self.reduce != other.reduce:
            raise ValueError(f"can't merge a {self.reduce} with a {other.reduce}")
        if self.reduce in ("mean", "exp_mean", "sum", "step_mean"):
            return Metric(self.reduce, self.value + other.value, self.count + other.count)
        pick = max if self.reduce == "max" else min
        return Metric(self.reduce, pick(self.value, other.value), self.count + other.count)

    def result(self) -> float:
        """The number to report; NaN for a mean over nothing."""
        if self.reduce not in ("mean", "exp_mean"):
            return self.value
        average = self.value / self.count if self.count else math.nan
        return average if self.reduce == "mean" else _exp(average)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def mean(total: float, count: float) -> Metric:
    return Metric("mean", total, count)


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merges metrics of many micro-batches or ranks by name."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def over_steps(steps: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merges the metrics of one rank's optimizer steps; a `step_mean` is their mean."""
    return merge(
        {name: _share(metric, len(steps)) for name, metric in step.items()} for step in steps
    )


def _share(metric: Metric, num_steps: int) -> Metric:
    if metric.reduce != "step_mean":
        return metric
    return Metric("step_mean", metric.value / num_steps, metric.count)


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.result() for name, metric in metrics.items()}
