"""Do a process reward model's probabilities come true? Reliability diagram and its one number.

Expected calibration error [Guo et al., arXiv:1706.04599, eq. 3]: probabilities fall into equal
bins; ECE = sum_b (n_b / n) |mean probability_b - share of right steps_b|.

    python -m rlpost.prm.calibration outputs/prm_train/<time>

draws the diagram of a run that trained such a model, from its last samples files: what the model
said of each batch's steps before it was trained on them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpost.errors import DataError
from rlpost.lazy import LazyModule
from rlpost.types import Array

if TYPE_CHECKING:
    import pyarrow.parquet as pq
else:
    pq = LazyModule("pyarrow.parquet")

NUM_BINS = 10
LAST_BATCHES = 5  # of a run: those of the model that it leaves, or nearly
COLUMNS = ("reason", "step_index", "step_scores", "step_probability")


def bin_sums(probabilities: Array, scores: Array) -> Array:
    """[3, NUM_BINS]: steps, sum of probabilities, sum of scores in each bin; sums may be added."""
    bins = np.minimum((probabilities * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    columns = (np.ones_like(probabilities), probabilities, scores)
    return np.stack([np.bincount(bins, weights, NUM_BINS) for weights in columns])


def calibration_error(sums: Array) -> float:
    """ECE of such sums; NaN over nothing."""
    count, probability, score = sums
    total = count.sum()
    return float(np.abs(probability - score).sum() / total) if total else math.nan


def read_predictions(run_dir: Path, *, last: int) -> tuple[Array, Array]:
    """(probabilities, scores) of the scored steps of the run's `last` batches.

    Raises DataError for a run without them.
    """
    files = sorted((run_dir / "samples").glob("step_*.parquet"))[-last:]
    pairs = [pair for file in files for pair in _pairs(file)]
    if not pairs:
        raise DataError(
            f"{run_dir}/samples holds no step_probability; give the folder of a run of "
            "+recipe=prm_train"
        )
    made: Array = np.array(pairs)
    return made[:, 0], made[:, 1]


def _pairs(file: Path) -> list[tuple[float, float]]:
    names = set(pq.read_schema(file).names)
    if not names.issuperset(COLUMNS):
        return []
    rows = pq.read_table(file, columns=list(COLUMNS)).to_pylist()
    return [pair for row in rows if row["reason"] == "trained" for pair in _of_sample(row)]


def _of_sample(row: Any) -> list[tuple[float, float]]:
    return [
        (probability, row["step_scores"][step])
        for step, probability in zip(row["step_index"], row["step_probability"], strict=True)
        if not math.isnan(probability)
    ]


def draw(sums: Array, path: Path) -> None:
    """Writes the reliability diagram as a PNG. Needs matplotlib (extra `dev`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count, probability, score = sums
    used = count > 0
    figure, (diagram, histogram) = pyplot.subplots(
        2, 1, figsize=(5, 6), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    diagram.plot([0, 1], [0, 1], color="grey", linestyle="--", label="perfect")
    diagram.plot(
        probability[used] / count[used], score[used] / count[used], marker="o", label="model"
    )
    diagram.set(ylabel="share of right steps", xlim=(0, 1), ylim=(0, 1))
    diagram.set_title(f"{int(count.sum())} steps, calibration error {calibration_error(sums):.3f}")
    diagram.legend(loc="upper left")
    centres = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
    histogram.bar(centres, count, width=0.9 / NUM_BINS)
    histogram.set(xlabel="probability that the step is right", ylabel="steps")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m rlpost.prm.calibration <run folder>")
    run_dir = Path(arguments[0])
    sums = bin_sums(*read_predictions(run_dir, last=LAST_BATCHES))
    target = run_dir / "calibration.png"
    draw(sums, target)
    print(f"calibration error {calibration_error(sums):.4f}, diagram: {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
