"""Metric values that know how they reduce across micro-batches and ranks. No sinks here.

Names are `area/name/stat`, e.g. `rollout/reward/mean`, `time/train_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Reduce = Literal["mean", "exp_mean", "sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A partial metric: `mean` carries (sum, count), so merging is exact for unequal parts.

    `exp_mean` is exp of such a mean (perplexity), taken after all parts are merged.
    """

    reduce: Reduce
    value: float
    count: float = 1.0

    def merge(self, other: Metric) -> Metric:
        if self.reduce != other.reduce:
            raise ValueError(f"can't merge a {self.reduce} with a {other.reduce}")
        if self.reduce in ("mean", "exp_mean", "sum"):
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


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.result() for name, metric in metrics.items()}
