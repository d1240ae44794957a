"""Keeps a run's metrics in memory, for what is decided by them when the run is over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpost.tracking.base import RunStatus
from rlpost.tracking.files import whole_rows


class HistoryTracker:
    """`values`: name -> its values, step after step, NaN included.

    Those of the steps before a run went on in its folder count, too.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def start(self, *, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> None:
        """Takes up what `metrics.jsonl` holds: a missing value is null there, infinity a text."""
        for row in whole_rows(run_dir):
            step = row.pop("step")
            self.log(step, {k: math.nan if v is None else float(v) for k, v in row.items()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.values.setdefault(name, []).append(float(value))

    def artifact(self, path: Path) -> None:
        """Nothing to keep: only numbers are asked for."""

    def close(self, status: RunStatus) -> None:
        """Nothing to close."""

    def report(self) -> Mapping[str, str]:
        return {}
