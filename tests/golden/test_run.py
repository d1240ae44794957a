"""The numbers of a short run, against tests/golden/run.json.

A change of the maths, of the data's order or of the sampling shows here. When it is meant, rewrite
the file with `python tests/golden/test_run.py` and explain the new numbers in the commit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared_runs import Runs
from whole_run import WholeRun

GOLDEN = Path(__file__).parent / "run.json"
STEPS = (1, 2, 3)
EXACT = ("rollout/reward/mean", "rollout/accuracy/mean", "rollout/length/mean")
ROUNDED = ("train/loss", "train/grad_norm", "train/entropy", "rollout/reward/std")


def numbers(run: WholeRun) -> dict[str, list[float]]:
    steps = run.steps()
    return {name: [steps[step][name] for step in STEPS] for name in (*EXACT, *ROUNDED)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_run_gives_the_golden_numbers(runs: Runs) -> None:
    golden, actual = json.loads(GOLDEN.read_text()), numbers(runs.get("sync"))
    for name in EXACT:
        assert actual[name] == golden[name], name
    for name in ROUNDED:
        assert actual[name] == pytest.approx(golden[name], rel=1e-4, abs=1e-4), name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = Runs(Path(folder))
        try:
            rows = numbers(made.get("sync")).items()
            lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows)
            GOLDEN.write_text("{\n" + lines + "\n}\n")
        finally:
            made.end()
