"""What happened when: `events.jsonl`, one event a line, and its export as a Chrome trace."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MAIN_LANE = "driver"


class Timeline:
    """Appends events to `path`; safe to use from many threads and tasks.

    Times are seconds since the epoch, so events of different processes share one axis. A lane is
    one row of the picture: the driver, a trainer rank, an engine.

        {"name": "train", "start": 1764433000.1, "end": 1764433002.4, "lane": "driver", "step": 3}

    `on_start` is told the name of each span that begins, e.g. to show what the run is doing.
    """

    def __init__(self, path: Path, *, on_start: Callable[[str], None] | None = None) -> None:
        self.path = path
        self._on_start = on_start
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def span(self, name: str, *, lane: str = MAIN_LANE, **attributes: Any) -> Iterator[None]:
        """Records how long the block took, also when it raises."""
        if self._on_start is not None:
            self._on_start(name)
        start = time.time()
        try:
            yield
        finally:
            self.add(name, start, time.time(), lane=lane, **attributes)

    def add(
        self, name: str, start: float, end: float, *, lane: str = MAIN_LANE, **attributes: Any
    ) -> None:
        """Records an event that was timed elsewhere, e.g. inside a worker."""
        event = {"name": name, "start": start, "end": end, "lane": lane, **attributes}
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(event) + "\n")

    def events(self) -> list[dict[str, Any]]:
        """Those that were written whole; a killed driver may have died within the last line."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def export_chrome(self, path: Path) -> None:
        """Writes the trace that chrome://tracing and Perfetto open; times in microseconds."""
        events = self.events()
        lanes = {lane: row for row, lane in enumerate(dict.fromkeys(e["lane"] for e in events))}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": lane}}
            for lane, row in lanes.items()
        ]
        spans = [_chrome_span(event, lanes[event["lane"]]) for event in events]
        path.write_text(json.dumps({"traceEvents": names + spans}))


def _chrome_span(event: dict[str, Any], row: int) -> dict[str, Any]:
    rest = {key: event[key] for key in event.keys() - {"name", "start", "end", "lane"}}
    start_us = event["start"] * 1e6
    return {
        "ph": "X",
        "name": event["name"],
        "pid": 0,
        "tid": row,
        "ts": start_us,
        "dur": event["end"] * 1e6 - start_us,
        "args": rest,
    }
