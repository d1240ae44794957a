"""Collects one step's metrics and timings and hands them to the tracker in one row."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from rlpost.tracking.base import Tracker
from rlpost.tracking.timeline import Timeline


class Recorder:
    """Metrics of the step being made. `flush(step)` sends them and starts anew."""

    def __init__(self, tracker: Tracker, timeline: Timeline) -> None:
        self._tracker = tracker
        self._timeline = timeline
        self._metrics: dict[str, float] = {}

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times a phase: adds to `time/<name>_s` and to the timeline."""
        started = time.monotonic()
        try:
            with self._timeline.span(name):
                yield
        finally:
            self.add_time(name, time.monotonic() - started)

    def add_time(self, name: str, seconds: float) -> None:
        key = f"time/{name}_s"
        self._metrics[key] = self._metrics.get(key, 0.0) + seconds

    def add(self, metrics: Mapping[str, float]) -> None:
        self._metrics.update(metrics)

    def rate(self, name: str, amount: float, phase: str) -> None:
        """`amount` over the seconds of `phase` in this step, if it took any."""
        seconds = self._metrics.get(f"time/{phase}_s", 0.0)
        if seconds > 0:
            self._metrics[name] = amount / seconds

    def flush(self, step: int) -> None:
        self._tracker.log(step, self._metrics)
        self._metrics = {}
