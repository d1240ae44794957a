"""What a run changed: its first numbers beside its last ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

LABELS = {  # pattern of a metric's name -> what people call it; in the order of the table
    r"eval/(.+)/accuracy": "held-out accuracy ({})",
    r"eval/(.+)/length/mean": "held-out answer's tokens ({})",
    r"rollout/reward/mean": "reward",
    r"prm/score/mean": "score of a step",
    r"distill/divergence/mean": "divergence from the teacher",
    r"critic/explained_variance": "variance explained by the critic",
    r"train/entropy": "entropy",
    r"train/loss": "loss",
}


class Comparison:
    """First and last value of each metric in `LABELS`; missing ones (NaN) don't count."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if label_of(name) and not math.isnan(value):
                self._first.setdefault(name, value)
                self._last[name] = value

    def rows(self) -> Iterator[tuple[str, float, float]]:
        """Label, first and last value."""
        for pattern in LABELS:
            for name, first in self._first.items():
                if re.fullmatch(pattern, name):
                    yield label_of(name), first, self._last[name]


def label_of(name: str) -> str:
    """What people call the metric; "" for one that is not compared."""
    for pattern, label in LABELS.items():
        if found := re.fullmatch(pattern, name):
            return label.format(*found.groups())
    return ""
