"""The debug options on whole runs, and a run that is run once more.

`fast` runs under the profiler; its samples are what `train_only` trains on.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from whole_run import SFT, WholeRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECIPE = "+recipe=grpo_prm_distill"
Start = Callable[..., WholeRun]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    folder, runs = tmp_path_factory.mktemp("debug"), []

    def launch(*overrides: str) -> WholeRun:
        runs.append(WholeRun(folder, *overrides))
        return runs[-1].finished()

    yield launch
    for run in runs:
        run.end()


@pytest.fixture(scope="module")
def fast(start: Start) -> WholeRun:
    return start(RECIPE, "debug=[fast,profile]")


def logs(run: WholeRun) -> set[str]:
    return {path.stem for path in (run.run_dir / "logs").glob("*-[0-9].log")}


def trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def test_fast_runs_the_whole_recipe_without_training_a_model_first(fast: WholeRun) -> None:
    assert list(fast.steps()) == [1, 2]
    assert logs(fast) >= {"actor-0", "teacher.default-0", "engine-0", "rollout-0"}
    assert fast.checkpoint(2).is_dir()
    models = [path.name for path in (fast.output_dir / "models").iterdir() if path.is_dir()]
    assert models
    assert all(name.startswith("tiny-") for name in models)


def test_a_profile_shows_every_process_at_work(fast: WholeRun) -> None:
    folder = fast.run_dir / "profile"
    for worker in ("actor-0", "teacher.default-0", "engine-0"):
        names = {event.get("name", "") for event in trace(folder / f"{worker}.json.gz")}
        assert any("attention" in name for name in names), worker
    table = (folder / "memory.txt").read_text().splitlines()
    assert [line.split()[0] for line in table[1:]] == ["actor-0", "teacher.default-0", "engine-0"]
    assert all(float(line.split()[1]) > 50 for line in table[1:])


def test_train_only_repeats_the_first_step_of_the_run_that_wrote_the_samples(
    fast: WholeRun, start: Start
) -> None:
    samples = f"debug.samples_from={fast.run_dir}"
    run = start(RECIPE, "debug=[fast,train_only]", samples, "num_steps=2")
    assert "engine-0" not in logs(run)
    for name in ("train/loss", "train/grad_norm", "rollout/reward/mean"):
        assert run.column(name) == fast.column(name), name
    assert not (run.run_dir / "checkpoints").exists()


def test_rollout_only_generates_and_scores(start: Start) -> None:
    run = start(RECIPE, "debug=[fast,rollout_only]")
    assert logs(run) == {"engine-0", "rollout-0"}
    rows = run.metrics()
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["perf/generated_tokens_per_s"] > 0 for row in rows)
    assert all("train/loss" not in row and "rollout/reward/mean" in row for row in rows)
    samples = pq.read_table(run.run_dir / "samples" / "step_000002.parquet").to_pylist()
    assert [row["reason"] for row in samples] == ["admitted"] * 4


def test_a_saved_run_runs_once_more_with_the_same_result(start: Start) -> None:
    first = start(*SFT, "num_steps=2")
    again = start("-cp", str(first.run_dir), "-cn", "rerun")
    assert again.run_dir != first.run_dir
    assert again.column("train/loss") == first.column("train/loss")
    assert len(first.column("train/loss")) == 2
