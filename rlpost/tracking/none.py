"""No experiment database: the run's folder and the console are the only record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.tracking.base import RunStatus


@dataclass(frozen=True)
class NoTrackerConfig:
    """Nothing to decide."""


class NoTracker:
    """Accepts everything and keeps nothing."""

    Config = NoTrackerConfig

    def __init__(self, config: NoTrackerConfig, *, resume_run_id: str | None = None) -> None:
        self.config = config

    @property
    def run_id(self) -> str | None:
        return None

    def start(self, *, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def artifact(self, path: Path) -> None:
        pass

    def close(self, status: RunStatus) -> None:
        pass

    def report(self) -> Mapping[str, str]:
        return {}
