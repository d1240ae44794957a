"""What a sweep knows about one of its jobs: a small file in the job's folder.

The job may run in another process or on another machine than the sweep, so a file is all that the
two share. It is written when the job starts and when it ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FILE = "status.json"

JobStatus = Literal["RUNNING", "FINISHED", "PLANNED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class JobRecord:
    """Job 3 failed after 2.5 s:

    JobRecord(3, "/out/3", ("seed=2",), "FAILED", None, 2.5, "EngineError: died", "node1", 4711)
    """

    job: int
    folder: str
    overrides: tuple[str, ...]
    status: JobStatus
    objective: float | None  # None: it has none
    seconds: float
    reason: str  # why it has no objective; "" when there is nothing to say
    host: str  # where it runs or ran, as process `pid`
    pid: int


def write(record: JobRecord) -> None:
    """By rename, so that a reader never sees half of it."""
    folder = Path(record.folder)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{FILE}.unfinished"
    unfinished.write_text(json.dumps(asdict(record), indent=2) + "\n")
    os.replace(unfinished, folder / FILE)


def read_all(sweep_dir: Path) -> list[JobRecord]:
    """The jobs of a sweep that were started, in their order."""
    return sorted(_read(sweep_dir), key=lambda record: record.job)


def _read(sweep_dir: Path) -> Iterator[JobRecord]:
    for path in sweep_dir.rglob(FILE):
        values = json.loads(path.read_text())
        yield JobRecord(**{**values, "overrides": tuple(values["overrides"])})
