"""A file in a sweep's folder: which runs of trackers stand for it, and what its jobs differ in.

Jobs lie in folders below it and find it there, in whichever process or machine they run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlpost.wording import short_names

FILE = "sweep.json"
OVERRIDES = Path(".hydra/overrides.yaml")  # in a job's folder, by Hydra
NAME_LENGTH = 200


def write(folder: Path, runs: Mapping[str, str], varied: Sequence[str]) -> None:
    """`runs`: address of a store -> id of the sweep's run there; `varied`: keys of the jobs."""
    told = {"runs": dict(runs), "varied": list(varied)}
    (folder / FILE).write_text(json.dumps(told, indent=2) + "\n")


def parent_run(run_dir: Path, store: str) -> str | None:
    """Id, in `store`, of the sweep that the run in `run_dir` is a job of."""
    runs: dict[str, str] = _sweep_of(run_dir).get("runs", {})
    return runs.get(store)


def name_among_jobs(run_dir: Path) -> str:
    """`lr=0.0001 algorithm=rloo`: what tells a job from the others; else its folder's name."""
    file = run_dir / OVERRIDES
    overrides = yaml.safe_load(file.read_text()) if file.is_file() else []
    return differences(overrides, _sweep_of(run_dir)["varied"])[:NAME_LENGTH] or run_dir.name


def differences(overrides: Sequence[str], varied: Sequence[str]) -> str:
    """The overrides of the keys that vary, by short names, numbers with four digits."""
    names = short_names(varied)
    pairs = [item.lstrip("+~").partition("=") for item in overrides]
    return " ".join(f"{names[key]}={brief(value)}" for key, _, value in pairs if key in names)


def brief(value: str) -> str:
    try:
        return f"{float(value):.4g}" if "." in value else value
    except ValueError:
        return value


def _sweep_of(run_dir: Path) -> dict[str, Any]:
    """Empty for a run that is no job."""
    for folder in run_dir.absolute().parents:
        if (folder / FILE).is_file():
            told: dict[str, Any] = json.loads((folder / FILE).read_text())
            return told
    return {}
