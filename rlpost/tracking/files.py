"""The record that every run leaves in its own folder: metrics.jsonl, and where the rest is."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlpost.tracking.base import RunStatus
from rlpost.tracking.excerpts import FOLDER as EXCERPTS
from rlpost.tracking.last_files import TRACE

METRICS = "metrics.jsonl"


class FilesTracker:
    """Writes `metrics.jsonl`, a JSON object for each call of `log`, on disk when `log` returns.

        {"step": 3, "rollout/reward/mean": 0.41, "train/loss": null}

    A metric without a value (NaN) is null; an infinite one is the string "inf" or "-inf".
    """

    def __init__(self) -> None:
        self._run_dir: Path | None = None

    def start(self, *, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step} | {name: _plain(value) for name, value in metrics.items()}
        with (self._started() / METRICS).open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def artifact(self, path: Path) -> None:
        """Nothing to do: artefacts already lie in the run's folder."""

    def close(self, status: RunStatus) -> None:
        """Nothing to do: each row was on disk at once."""

    def report(self) -> Mapping[str, str]:
        if self._run_dir is None:
            return {}
        checkpoints = sorted(self._run_dir.glob("checkpoints/step_*"), key=_step_number)
        places = {
            "checkpoint": checkpoints[-1] if checkpoints else None,
            "samples": self._run_dir / "samples",
            "metrics": self._run_dir / METRICS,
            "excerpts": self._run_dir / EXCERPTS,
            "timeline": self._run_dir / TRACE,
        }
        return {name: str(path) for name, path in places.items() if path and path.exists()}

    def _started(self) -> Path:
        assert self._run_dir is not None, "log() before start()"
        return self._run_dir


def whole_rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    """As they stand in the file; the last is left out if a killed driver did not finish it."""
    path = run_dir / METRICS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    for line in lines:
        if line.endswith("\n"):
            yield json.loads(line)


def forget_after(run_dir: Path, step: int) -> None:
    """Takes out the rows of steps that were not saved and come again."""
    path = run_dir / METRICS
    if not path.exists():
        return
    kept = [json.dumps(row) + "\n" for row in whole_rows(run_dir) if row["step"] <= step]
    draft = path.with_name(f".{METRICS}")
    draft.write_text("".join(kept))
    os.replace(draft, path)


def _plain(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return str(float(value)) if math.isinf(value) else float(value)


def _step_number(path: Path) -> int:
    digits = path.name.removeprefix("step_")
    return int(digits) if digits.isdecimal() else -1
