"""A few samples of the first and the last step, as text that can be read without tools."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "excerpts"
NUM_SAMPLES = 4  # of a step
TEXT_LENGTH = 4000  # characters of one prompt or response
HEAD = ("reason", "finish_reason", "reward", "accuracy")
TEXTS = ("prompt", "response", "answer")


def write_excerpts(run_dir: Path) -> None:
    """`excerpts/step_000001.txt` and that of the last step, from `samples/`; none without those."""
    files = sorted(run_dir.glob("samples/step_*.parquet"))
    for file in dict.fromkeys([*files[:1], *files[-1:]]):
        path = run_dir / FOLDER / f"{file.stem}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n\n".join(map(sample_text, spread(read(file)))) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """The samples of a step, without their per-token columns."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as parquet:
        names = [field.name for field in parquet.schema_arrow if "list" not in str(field.type)]
        rows: list[dict[str, Any]] = parquet.read(columns=names).to_pylist()
    return rows


def spread(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A few from the lowest to the highest reward, both included; those without one come last."""
    ordered = sorted(rows, key=lambda row: (not known(row.get("reward")), row.get("reward") or 0))
    count = min(NUM_SAMPLES, len(ordered))
    steps = max(count - 1, 1)
    return [ordered[index * (len(ordered) - 1) // steps] for index in range(count)]


def sample_text(row: Mapping[str, Any]) -> str:
    """A head with the numbers, then prompt, response and answer as they are."""
    parts = [name for name in row if name.startswith(("reward/", "prm/"))]
    head = [str(row.get("sample_id"))]
    head += [f"{name} {row[name]}" for name in (*HEAD, *parts) if known(row.get(name))]
    lines = ["=== " + "  ".join(head)]
    for name in TEXTS:
        if row.get(name) is not None:
            lines += [f"--- {name}", str(row[name])[:TEXT_LENGTH]]
    return "\n".join(lines)


def known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))
