"""Draws reward and held-out accuracy of runs: `python recipes/plot.py RUN_DIR... -o curve.png`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

REWARD = "rollout/reward/mean"


def read(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, which may also be named itself."""
    path = run_dir / "metrics.jsonl" if run_dir.is_dir() else run_dir
    return [json.loads(line) for line in path.read_text().splitlines()]


def column(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have the metric."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


def accuracies(rows: list[dict[str, Any]]) -> list[str]:
    names = {name for row in rows for name in row}
    return sorted(name for name in names if name[:5] == "eval/" and name[-9:] == "/accuracy")


def draw(runs: dict[str, list[dict[str, Any]]], output: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), sharex=True)
    for label, rows in runs.items():
        left.plot(*column(rows, REWARD), label=label)
        for name in accuracies(rows):
            right.plot(*column(rows, name), marker="o", label=f"{label}: {name.split('/')[1]}")
    left.set(title="mean reward of the batch", xlabel="step")
    right.set(title="accuracy on held-out prompts", xlabel="step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(output, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders or metrics.jsonl files")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the picture")
    parser.add_argument("--labels", nargs="+", help="one name per run; the folders' otherwise")
    arguments = parser.parse_args()
    labels = arguments.labels or [path.name for path in arguments.runs]
    if len(labels) != len(arguments.runs):
        parser.error(f"--labels has {len(labels)} names for {len(arguments.runs)} runs")
    draw(dict(zip(labels, map(read, arguments.runs), strict=True)), arguments.output)


if __name__ == "__main__":
    main()
