"""TensorBoard as a tracker: one event file in the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from rlpost.tracking.background import BackgroundTracker
from rlpost.tracking.event_file import EventFile
from rlpost.tracking.guard import Will

FOLDER = "tensorboard"


@dataclass(frozen=True)
class TensorboardTrackerConfig:
    """Where it writes is not a matter of choice: below the run's own folder."""

    max_queued: PositiveInt
    start_timeout_s: PositiveFloat
    close_timeout_s: PositiveFloat

    def conflicts(self, run: Any) -> Iterable[str]:
        if find_spec("tensorboard") is None:
            yield (
                "tracking.tensorboard: the package tensorboard is not installed; install the "
                "extra (pip install -e '.[tensorboard]'), or leave it out of tracking=[...]"
            )


class TensorboardTracker(BackgroundTracker):
    """Needs neither torch nor tensorflow. A resumed run has a folder, so a curve, of its own."""

    Config = TensorboardTrackerConfig

    def __init__(
        self,
        config: TensorboardTrackerConfig,
        *,
        resume_run_id: str | None,
        leave_will: Callable[[Will], None],
    ) -> None:
        """Neither has a use here: files know no run by id, and each write is on disk at once."""
        super().__init__(
            "TensorBoard",
            max_queued=config.max_queued,
            start_timeout_s=config.start_timeout_s,
            close_timeout_s=config.close_timeout_s,
        )
        self.config = config
        self._folder: Path | None = None

    def start(self, *, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> None:
        self._folder = run_dir / FOLDER
        super().start(run_name=run_name, run_dir=run_dir, params=params)

    def report(self) -> Mapping[str, str]:
        if self._folder is None:
            return {}
        command = f".venv/bin/tensorboard --logdir {self._folder}"
        return {**super().report(), "TensorBoard": command}

    def _open(self, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> EventFile:
        return EventFile(run_dir / FOLDER)
