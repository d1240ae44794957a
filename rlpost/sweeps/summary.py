"""The table at the end of a sweep: its jobs, best first."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlpost.objective import Direction, ObjectiveConfig
from rlpost.sweeps.record import JobRecord

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


def shared_overrides(records: Sequence[JobRecord]) -> list[str]:
    """What all jobs have in common, and thus what no row has to say. One job shares nothing."""
    if len(records) < 2:
        return []
    return [
        item
        for item in records[0].overrides
        if all(item in record.overrides for record in records[1:])
    ]


def rows(records: Sequence[JobRecord]) -> list[tuple[str, ...]]:
    """Texts under `COLUMNS`."""
    shared = shared_overrides(records)
    return [
        (
            str(record.job),
            " ".join(item for item in record.overrides if item not in shared),
            "" if record.objective is None else f"{record.objective:.6g}",
            record.status,
            f"{record.seconds:.1f}",
            record.folder,
            record.reason,
        )
        for record in records
    ]


def csv_text(records: Sequence[JobRecord]) -> str:
    """Whole numbers and whole reasons, for programs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record, row in zip(records, rows(records), strict=True):
        objective = "" if record.objective is None else repr(record.objective)
        writer.writerow([*row[:2], objective, *row[3:]])
    return text.getvalue()


def markdown(records: Sequence[JobRecord], title: str) -> str:
    lines = [f"# {title}", "", *(f"- for all jobs: `{item}`" for item in shared_overrides(records))]
    lines += ["", line(COLUMNS), line(["---"] * len(COLUMNS))]
    lines += [line([cell(text) for text in row]) for row in rows(records)]
    return "\n".join(lines) + "\n"


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def table(records: Sequence[JobRecord], title: str) -> Table:
    """For a terminal; folders are named by their last part."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left")
    for column in COLUMNS:
        made.add_column(column, overflow="fold")
    for row in rows(records):
        *cells, status, seconds, folder, reason = row
        short = [Path(folder).name, reason.splitlines()[0] if reason else ""]
        styled = Text(status, style=STYLES.get(status, ""))
        made.add_row(*map(Text, cells), styled, Text(seconds), *map(Text, short))
    return made


def heading(objective: ObjectiveConfig | None, num_jobs: int) -> str:
    """`sweep of 4 jobs, best first: maximize the last eval/*/accuracy`"""
    jobs = f"sweep of {num_jobs} job{'s'[: num_jobs != 1]}"
    if objective is None:
        return f"{jobs}; nothing is compared (objective: null)"
    return f"{jobs}, best first: {objective.direction} the {objective.reduce} {objective.metric}"
