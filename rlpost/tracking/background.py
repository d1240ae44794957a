"""A tracker whose work happens on one thread, so that the loop never waits for it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlpost.errors import TrackingError
from rlpost.tracking.base import RunStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """One call of `log`, with the time of that call."""

    step: int
    time_ms: int
    metrics: dict[str, float]


class Sink(Protocol):
    """An opened store. Its methods may be slow and may raise; they run on the thread only."""

    def log(self, rows: Sequence[Row]) -> None: ...

    def artifact(self, path: Path) -> None: ...

    def end(self, status: RunStatus) -> None: ...


@dataclass(frozen=True, slots=True)
class _End:
    status: RunStatus


Item = Row | Path | _End


class BackgroundTracker(ABC):
    """A subclass says how to `_open` its sink. Not opening is an error; trouble later a warning.

    The thread opens the sink, then consumes the queue (rows, artefacts, the end) and is woken by
    it; the end stops it. Rows that wait are written together. What can't be written is left out
    there and counted in `tracking/dropped/count`: training goes on, and metrics.jsonl has it.
    """

    def __init__(
        self, label: str, *, max_queued: int, start_timeout_s: float, close_timeout_s: float
    ) -> None:
        self._label = label
        self._key = f"tracking.{label.lower()}"  # where its options stand, for messages
        self._max_queued = max_queued
        self._start_timeout_s = start_timeout_s
        self._close_timeout_s = close_timeout_s
        self._queue: queue.Queue[Item] = queue.Queue(max_queued)
        self._opened = threading.Event()
        self._thread: threading.Thread | None = None
        self._sink: Sink | None = None
        self._start_error: Exception | None = None
        self._told = False  # that it did not start
        self._dropped = 0
        self._warned = False

    @abstractmethod
    def _open(self, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> Sink:
        """On the thread: the sink of a new run. Whatever it raises is why the start failed."""

    @property
    def run_id(self) -> str | None:
        """By which a resumed run finds its run here again; None where there is no such thing."""
        return None

    def start(self, *, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> None:
        """Returns at once; a failure to start is raised by the first `log`."""
        arguments = (run_name, run_dir, params)
        self._thread = threading.Thread(
            target=self._work, args=arguments, name=self._label, daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._wait_for_start()
        self._put(Row(step, int(time.time() * 1000), dict(metrics)))

    def artifact(self, path: Path) -> None:
        self._put(path)

    def close(self, status: RunStatus) -> None:
        """Writes what is queued, then the status. Never raises: the run's own error comes first."""
        if self._thread is None:
            return
        told = self._told
        try:
            self._wait_for_start()
        except TrackingError as error:
            if not told:
                logger.warning("%s", error)
            return
        deadline = time.monotonic() + self._close_timeout_s
        try:
            self._queue.put(_End(status), timeout=self._close_timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass  # the thread is stuck: told below
        if self._thread.is_alive():
            logger.warning(
                "%s did not finish within %g s (%s.close_timeout_s); its run may lack the last "
                "metrics and the status %s",
                self._label,
                self._close_timeout_s,
                self._key,
                status,
            )

    def report(self) -> Mapping[str, str]:
        if not self._dropped:
            return {}
        return {f"{self._label} lacks": f"{self._dropped} rows or files that were not written"}

    def _wait_for_start(self) -> None:
        """Raises TrackingError; from the second time on without a wait."""
        assert self._thread is not None, "start() has not been called"
        opened = self._opened.wait(0.0 if self._told else self._start_timeout_s)
        self._told = not opened or self._start_error is not None
        if not opened:
            raise TrackingError(
                f"{self._label} did not start within {self._start_timeout_s:g} s; see that what "
                f"{self._key} names can be reached, raise {self._key}.start_timeout_s, or run "
                "without it (tracking=none)"
            )
        if self._start_error is not None:
            raise TrackingError(
                f"{self._label} could not start: {self._start_error}; correct {self._key}, or run "
                f"without it (tracking=none)"
            ) from self._start_error

    def _put(self, item: Row | Path) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._drop(1, f"{self._max_queued} rows wait ({self._key}.max_queued)")

    def _drop(self, count: int, reason: str) -> None:
        self._dropped += count
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s lacks something from here on; training goes on, and the run's folder has it: "
                "%s",
                self._label,
                reason,
            )

    # -- on the thread -----------------------------------------------------------------------

    def _work(self, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> None:
        try:
            self._sink = self._open(run_name, run_dir, params)
        except Exception as error:  # raised in the loop's thread by `_wait_for_start`
            self._start_error = error
            return
        finally:
            self._opened.set()
        self._consume(self._sink)

    def _consume(self, sink: Sink) -> None:
        ended = False
        while not ended:
            for part in runs_of_rows(self._waiting()):
                ended = isinstance(part, _End)
                try:
                    self._write(sink, part)
                except Exception as error:
                    count = len(part) if isinstance(part, list) else 1
                    self._drop(count, f"{type(error).__name__}: {error}")

    def _waiting(self) -> list[Item]:
        """Everything that waits, at least one item."""
        items = [self._queue.get()]
        while not self._queue.empty():
            items.append(self._queue.get())
        return items

    def _write(self, sink: Sink, part: list[Row] | Path | _End) -> None:
        if isinstance(part, _End):
            sink.end(part.status)
        elif isinstance(part, Path):
            sink.artifact(part)
        else:
            if self._dropped:
                part[-1].metrics["tracking/dropped/count"] = float(self._dropped)
            sink.log(part)


def runs_of_rows(items: Sequence[Item]) -> Iterator[list[Row] | Path | _End]:
    """Rows that follow each other as one list, in order: [a, b, path, c] -> [a, b], path, [c]."""
    rows: list[Row] = []
    for item in items:
        if isinstance(item, Row):
            rows.append(item)
            continue
        if rows:
            yield rows
            rows = []
        yield item
    if rows:
        yield rows
