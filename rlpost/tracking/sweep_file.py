"""A file in a sweep's folder that says which runs of trackers stand for the whole sweep.

Jobs lie in folders below it and find it there, in whichever process or machine they run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FILE = "sweep.json"


def write(folder: Path, runs: Mapping[str, str]) -> None:
    """`runs`: address of a store -> id of the sweep's run there."""
    (folder / FILE).write_text(json.dumps({"runs": dict(runs)}, indent=2) + "\n")


def parent_run(run_dir: Path, store: str) -> str | None:
    """Id, in `store`, of the sweep that the run in `run_dir` is a job of."""
    for folder in run_dir.absolute().parents:
        if (folder / FILE).is_file():
            runs: dict[str, str] = json.loads((folder / FILE).read_text())["runs"]
            return runs.get(store)
    return None
