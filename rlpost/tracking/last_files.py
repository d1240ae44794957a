"""What is written once, at a run's end: by the driver, or by its guard when it was killed."""

from __future__ import annotations

from pathlib import Path

from rlpost.tracking.excerpts import FOLDER, write_excerpts
from rlpost.tracking.guard import Will
from rlpost.tracking.timeline import Timeline

EVENTS = "events.jsonl"
TRACE = "timeline.json"


def write_last_files(run_dir: Path | str) -> list[Path]:
    """The timeline as a Chrome trace, and a folder of excerpts of the samples."""
    run_dir = Path(run_dir)
    timeline = Timeline(run_dir / EVENTS)
    timeline.export_chrome(run_dir / TRACE)
    write_excerpts(run_dir)
    return present_last_files(run_dir)


def last_files_will(run_dir: Path) -> Will:
    """That the guard writes them."""
    return Will(f"{__name__}.{write_last_files.__name__}", {"run_dir": str(run_dir.absolute())})


def present_last_files(run_dir: Path | str) -> list[Path]:
    run_dir = Path(run_dir)
    return [path for path in (run_dir / TRACE, run_dir / FOLDER) if path.exists()]
