"""Several trackers behind one face."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlpost.errors import TrackingError
from rlpost.tracking.base import ChosenTracker, RunStatus, Tracker

logger = logging.getLogger(__name__)


class MultiTracker:
    """Passes every call to all its trackers. On close, each is closed whatever the others do.

    The `chosen` ones may fail to start (TrackingError), which ends the run; whatever else one of
    them raises is a warning, the first time. At the end they get the `last_files`; `summary` is
    called last, with the status and what all the trackers report.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        chosen: Mapping[str, ChosenTracker],
        *,
        summary: Callable[[RunStatus, Mapping[str, str]], None],
        last_files: Callable[[], Sequence[Path]],
    ) -> None:
        self._required = list(trackers)
        self._chosen = dict(chosen)
        self._trackers: list[Tracker] = [*trackers, *chosen.values()]
        self._warned: set[str] = set()
        self._summary = summary
        self._last_files = last_files
        self._open: list[Tracker] = []

    def start(self, *, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> None:
        """When one can't start, `close` still closes those that did."""
        for tracker in self._trackers:
            tracker.start(run_name=run_name, run_dir=run_dir, params=params)
            self._open.append(tracker)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._required:
            tracker.log(step, metrics)
        self._tell_chosen(lambda tracker: tracker.log(step, metrics))

    def artifact(self, path: Path) -> None:
        for tracker in self._required:
            tracker.artifact(path)
        self._tell_chosen(lambda tracker: tracker.artifact(path))

    def run_ids(self) -> dict[str, str]:
        """Name -> id, of the chosen trackers that know runs by id."""
        found = {name: tracker.run_id for name, tracker in self._chosen.items()}
        return {name: run_id for name, run_id in found.items() if run_id is not None}

    def close(self, status: RunStatus) -> None:
        """Raises the first tracker's error after all were closed. A second call does nothing."""
        closing, self._open = self._open, []
        if not closing:
            return
        ends: list[Callable[[], None]] = [partial(tracker.close, status) for tracker in closing]
        calls = [self._hand_over, *ends]
        errors = [error for error in map(error_of, calls) if error is not None]
        self._summary(status, self.report())
        if errors:
            raise errors[0]

    def _hand_over(self) -> None:
        for path in self._last_files():
            self.artifact(path)

    def _tell_chosen(self, call: Callable[[ChosenTracker], None]) -> None:
        for name, tracker in self._chosen.items():
            try:
                call(tracker)
            except TrackingError:
                raise
            except Exception as error:  # foreign code, and not worth the run
                if name not in self._warned:
                    self._warned.add(name)
                    logger.warning("tracking.%s: %s: %s", name, type(error).__name__, error)

    def report(self) -> Mapping[str, str]:
        return {name: text for tracker in self._trackers for name, text in tracker.report().items()}


def error_of(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None
