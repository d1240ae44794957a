"""The table at the end of a sweep: its jobs, best first."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rlpost.objective import Direction, ObjectiveConfig
from rlpost.sweeps.record import JobRecord
from rlpost.tracking.sweep_file import differences

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("job", "overrides", "objective", "status", "seconds", "folder", "reason")
STYLES = {"FAILED": "red", "KILLED": "yellow", "FINISHED": "green"}


def ranked(records: Sequence[JobRecord], direction: Direction) -> list[JobRecord]:
    """Best objective first; those without one after them, in the order of their numbers."""
    sign = -1.0 if direction == "maximize" else 1.0
    return sorted(
        records,
        key=lambda record: (
            record.objective is None,
            0.0 if record.objective is None else sign * record.objective,
            record.job,
        ),
    )


def shared_overrides(records: Sequence[JobRecord], varied: Collection[str]) -> list[str]:
    """What all jobs have in common, and thus what no row has to say."""
    return [item for item in records[0].overrides if key_of(item) not in varied]


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def rows(records: Sequence[JobRecord], varied: Collection[str]) -> list[tuple[str, ...]]:
    """Texts under `COLUMNS`."""
    return [
        (
            str(record.job),
            " ".join(item for item in record.overrides if key_of(item) in varied),
            "" if record.objective is None else f"{record.objective:.6g}",
            record.status,
            f"{record.seconds:.1f}",
            record.folder,
            record.reason,
        )
        for record in records
    ]


def csv_text(records: Sequence[JobRecord], varied: Collection[str]) -> str:
    """Whole numbers and whole reasons, for programs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record, row in zip(records, rows(records, varied), strict=True):
        objective = "" if record.objective is None else repr(record.objective)
        writer.writerow([*row[:2], objective, *row[3:]])
    return text.getvalue()


def markdown(records: Sequence[JobRecord], varied: Collection[str], title: str) -> str:
    lines = [f"# {title}", ""]
    lines += [f"- for all jobs: `{item}`" for item in shared_overrides(records, varied)]
    lines += ["", line(COLUMNS), line(["---"] * len(COLUMNS))]
    lines += [line([cell(text) for text in row]) for row in rows(records, varied)]
    return "\n".join(lines) + "\n"


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def table(records: Sequence[JobRecord], varied: Sequence[str]) -> Table:
    """For a terminal, which may be narrow: short names, and reasons in lines of their own."""
    from rich.table import Table
    from rich.text import Text

    made = Table()
    for column in COLUMNS[:5]:
        made.add_column(column, overflow="fold", no_wrap=column == "status")
    for record, row in zip(records, rows(records, varied), strict=True):
        job, _, objective, status, seconds, *_ = row
        styled = Text(status, style=STYLES.get(status, ""))
        differs = differences(record.overrides, varied)
        made.add_row(Text(job), Text(differs), Text(objective), styled, Text(seconds))
    return made


def reasons(records: Sequence[JobRecord]) -> list[str]:
    """`job 3 FAILED: EngineError: died`"""
    return [
        f"job {record.job} {record.status}: {record.reason.splitlines()[0]}"
        for record in records
        if record.reason
    ]


def heading(objective: ObjectiveConfig | None, num_jobs: int) -> str:
    """`sweep of 4 jobs, best first: maximize the last eval/*/accuracy`"""
    jobs = f"sweep of {num_jobs} job{'s'[: num_jobs != 1]}"
    if objective is None:
        return f"{jobs}; nothing is compared (objective: null)"
    return f"{jobs}, best first: {objective.direction} the {objective.reduce} {objective.metric}"
