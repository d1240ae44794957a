"""Several trackers behind one face."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpost.tracking.base import RunStatus, Tracker


class MultiTracker:
    """Passes every call to all its trackers. On close, each is closed whatever the others do.

    `summary` is called last, with the status and what all the trackers report.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        *,
        summary: Callable[[RunStatus, Mapping[str, str]], None],
    ) -> None:
        self._trackers = list(trackers)
        self._summary = summary
        self._open: list[Tracker] = []

    def start(self, *, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> None:
        """When one can't start, `close` still closes those that did."""
        for tracker in self._trackers:
            tracker.start(run_name=run_name, run_dir=run_dir, params=params)
            self._open.append(tracker)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def artifact(self, path: Path) -> None:
        for tracker in self._trackers:
            tracker.artifact(path)

    def close(self, status: RunStatus) -> None:
        """Raises the first tracker's error after all were closed. A second call does nothing."""
        errors: list[Exception] = []
        closing, self._open = self._open, []
        for tracker in closing:
            try:
                tracker.close(status)
            except Exception as error:
                errors.append(error)
        if closing:
            self._summary(status, self.report())
        if errors:
            raise errors[0]

    def report(self) -> Mapping[str, str]:
        return {name: text for tracker in self._trackers for name, text in tracker.report().items()}
