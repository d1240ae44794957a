"""A sweep as its leading process sees it: from Hydra's start of it to the table at the end.

Hydra has no hook for a sweep that is interrupted or fails, so `whole_sweep` stands around all of
Hydra and ends what Hydra's start hook began.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlpost.cli import unwritable
from rlpost.config import Section, build
from rlpost.errors import ConfigError
from rlpost.objective import ObjectiveConfig
from rlpost.sweeps import summary
from rlpost.sweeps.interrupt import ended, interrupt_jobs, shielding_children
from rlpost.sweeps.record import JobRecord, read_all
from rlpost.tracking import sweep_file
from rlpost.tracking.base import RunStatus
from rlpost.tracking.guard import Guard
from rlpost.tracking.mlflow import MlflowTracker

NO_TRIAL = "No trials are completed yet"  # Optuna, when it is asked for the best of none
KEPT = ("summary.csv", "summary.md", "multirun.yaml", "optimization_results.yaml")


class Sweep:
    """`stores` get one run each for the whole sweep; the jobs' runs are its children."""

    def __init__(
        self,
        folder: Path,
        objective: ObjectiveConfig | None,
        stores: Sequence[Section],
        varied: Sequence[str],
        *,
        jobs_apart: bool = False,
    ) -> None:
        """`varied` are the keys that its jobs differ in.

        `jobs_apart`: each job is a process of its own on this machine.
        """
        self.folder = folder
        self._objective = objective
        self._varied = tuple(varied)
        self._jobs_apart = jobs_apart
        self._guard = Guard(folder / "guard.log")
        self._trackers: list[MlflowTracker] = [
            build(store, resume_run_id=None, leave_will=self._guard.add) for store in stores
        ]
        self._until_the_end = contextlib.ExitStack()
        self._begun = False

    def begin(self, run_name: str, params: Mapping[str, Any]) -> None:
        """Raises TrackingError if a store can't be reached: no job could reach it either.

        Raises ConfigError if its folder can't be made.
        """
        from rlpost.run import stoppable

        make_folder(self.folder)
        self._until_the_end.enter_context(stoppable())
        if self._jobs_apart:
            self._until_the_end.enter_context(shielding_children())
        if self._trackers:
            self._until_the_end.enter_context(self._guard)
        for tracker in self._trackers:
            tracker.start(run_name=run_name, run_dir=self.folder, params=params)
        runs = {item.config.tracking_uri: str(item.run_id) for item in self._trackers}
        sweep_file.write(self.folder, runs, self._varied)
        self._begun = True

    def end(self, status: RunStatus) -> bool:
        """Prints and keeps the summary, closes the trackers. Whether every job ended well."""
        with self._until_the_end:
            return self._end(status)

    def _end(self, status: RunStatus) -> bool:
        records = self.records(status)
        bad = {record.status for record in records} & {"FAILED", "KILLED"}
        if records:
            self._summarise(records)
        if bad and status == "FINISHED":
            status = "FAILED" if "FAILED" in bad else "KILLED"
        for tracker in self._trackers:
            if self._begun:
                self._report(tracker, records)
            tracker.close(status)
        self._guard.dismiss()
        return not bad

    def records(self, status: RunStatus) -> list[JobRecord]:
        """Best first. What is written of a job may be older than its process's end."""
        if status == "KILLED":
            interrupt_jobs(self.folder)
        over = status == "FINISHED"
        records = [
            item if item.status != "RUNNING" else lost(item) if over or ended(item) else left(item)
            for item in read_all(self.folder)
        ]
        return summary.ranked(records, self._objective.direction if self._objective else "maximize")

    def _summarise(self, records: list[JobRecord]) -> None:
        from rich.console import Console

        title = summary.heading(self._objective, len(records))
        (self.folder / "summary.csv").write_text(summary.csv_text(records, self._varied))
        (self.folder / "summary.md").write_text(summary.markdown(records, self._varied, title))
        console = Console(highlight=False, soft_wrap=True)
        shared = " ".join(summary.shared_overrides(records, self._varied))
        console.print(f"\nfor all jobs: {shared}" if shared else "", markup=False)
        console.print(title, markup=False)
        Console(highlight=False).print(summary.table(records, self._varied))
        for item in summary.reasons(records):
            console.print(item, markup=False)
        place = str(self.folder).replace(f"{Path.cwd()}/", "")
        console.print(f"summary: {place}/summary.md, summary.csv", markup=False)

    def _report(self, tracker: MlflowTracker, records: list[JobRecord]) -> None:
        values = [record.objective for record in records if record.objective is not None]
        failed = sum(record.status == "FAILED" for record in records)
        best = {"sweep/objective/best": values[0]} if values else {}
        tracker.log(0, {"sweep/jobs": len(records), "sweep/jobs/failed": failed, **best})
        for name in KEPT:
            if (self.folder / name).is_file():
                tracker.artifact(self.folder / name)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([unwritable(error)]) from error


def left(record: JobRecord) -> JobRecord:
    """The sweep ends before this job."""
    return replace(record, reason=f"still runs as process {record.pid} on {record.host}")


def lost(record: JobRecord) -> JobRecord:
    return replace(record, status="FAILED", reason="its process ended without a word")


_current: Sweep | None = None


def lead(sweep: Sweep) -> None:
    """Makes `sweep` the one that `whole_sweep` ends."""
    global _current
    assert _current is None, "a process leads one sweep"
    _current = sweep


def led_here() -> bool:
    """Whether this process leads the sweep, rather than running a job for another one."""
    return _current is not None


@contextlib.contextmanager
def whole_sweep() -> Iterator[None]:
    """Ends the sweep that was begun inside, if any, however it goes. Exits 1 if a job failed."""
    global _current
    status: RunStatus = "FAILED"
    well = True
    try:
        yield
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    except ValueError as error:
        if not led_here() or NO_TRIAL not in str(error):
            raise
        status = "FINISHED"  # every trial failed: the summary says how
    finally:
        if _current is not None:
            well = _current.end(status)
            _current = None
    if not well:
        raise SystemExit(1)
