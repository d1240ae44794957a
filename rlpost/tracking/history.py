"""Keeps a run's metrics in memory, for what is decided by them when the run is over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpost.tracking.base import RunStatus


class HistoryTracker:
    """`values`: name -> its values, step after step, NaN included."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def start(self, *, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> None:
        """Nothing to open."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.values.setdefault(name, []).append(float(value))

    def artifact(self, path: Path) -> None:
        """Nothing to keep: only numbers are asked for."""

    def close(self, status: RunStatus) -> None:
        """Nothing to close."""

    def report(self) -> Mapping[str, str]:
        return {}
