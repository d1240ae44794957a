"""Sweeps as a user starts them: two at a time, in one output folder and one MLflow store."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from whole_run import GRPO, SFT, WholeRun, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PARENT = "mlflow.parentRunId"
GRID = (
    *("-m", *GRPO, "num_steps=1", "eval.before_training=false"),
    "objective.metric=rollout/reward/mean",
    "reward.parts.own.function.wanted=8,0,4,2",  # a score is divided by it
)
STUDY = (
    *("-m", *SFT, "num_steps=2", "hydra/sweeper=optuna"),
    *("hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=1"),
    "trainer.optimizer.lr=tag(log, interval(1e-4, 1e-2))",
    "seed=1,-1",
)


@dataclass(frozen=True)
class Ended:
    """A sweep that is over."""

    launch: WholeRun
    code: int

    @property
    def folder(self) -> Path:
        """The sweeps of a test share an output folder; each has a mark of its own."""
        found = self.launch.output_dir.glob("sweeps/*/0/.hydra/overrides.yaml")
        (folder,) = [path.parents[2] for path in found if self.launch.mark in path.read_text()]
        return folder

    def summary(self) -> list[dict[str, str]]:
        with (self.folder / "summary.csv").open() as file:
            return list(csv.DictReader(file))

    def parent(self) -> Any:
        (found,) = [run for run in self.launch.mlflow_runs() if self._is(run, self.folder)]
        return found

    def children(self) -> dict[str, Any]:
        """By the name of the job's folder."""
        parent = self.parent().info.run_id
        runs = [run for run in self.launch.mlflow_runs() if run.data.tags.get(PARENT) == parent]
        return {Path(run.data.tags["run_dir"]).name: run for run in runs}

    @staticmethod
    def _is(run: Any, folder: Path) -> bool:
        return Path(run.data.tags["run_dir"]) == folder


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    output_dir = tmp_path_factory.mktemp("sweeps")
    launches = {"grid": WholeRun(output_dir, *GRID), "study": WholeRun(output_dir, *STUDY)}
    try:
        yield {name: Ended(launch, launch.wait()) for name, launch in launches.items()}
    finally:
        for launch in launches.values():
            launch.end()


def test_a_failed_job_is_marked_and_the_others_run(both: dict[str, Ended]) -> None:
    grid = both["grid"]
    assert grid.code == 1, grid.launch.err
    rows = grid.summary()
    assert [row["status"] for row in rows] == ["FINISHED"] * 3 + ["FAILED"]
    assert rows[-1]["overrides"].endswith("wanted=0") and "division by zero" in rows[-1]["reason"]
    assert "job 1 failed: BudgetError" in grid.launch.err


def test_the_table_is_best_first(both: dict[str, Ended]) -> None:
    grid = both["grid"].summary()
    assert [row["overrides"][-1] for row in grid] == ["2", "4", "8", "0"]
    study = [float(row["objective"]) for row in both["study"].summary() if row["objective"]]
    assert study and study == sorted(study)
    assert "best first: maximize the last rollout/reward/mean" in both["grid"].launch.out


def test_jobs_are_children_of_one_mlflow_run_with_the_true_status(both: dict[str, Ended]) -> None:
    statuses = {name: run.info.status for name, run in both["grid"].children().items()}
    assert statuses == {"0": "FINISHED", "1": "FAILED", "2": "FINISHED", "3": "FINISHED"}
    trials = both["study"].summary()
    ran = {row["job"] for row in trials if row["status"] == "FINISHED"}
    assert set(both["study"].children()) == ran, "a refused configuration starts no run"
    assert [sweep.parent().info.status for sweep in both.values()] == ["FAILED", "FAILED"]
    assert len(both["grid"].launch.mlflow_runs()) == 2 + len(statuses) + len(ran)


def test_the_sweeps_own_run_holds_what_was_asked_for_and_the_table(both: dict[str, Ended]) -> None:
    parent = both["grid"].parent()
    assert parent.data.params["overrides.reward.parts.own.function.wanted"] == "8,0,4,2"
    client = both["grid"].launch.mlflow_client()
    names = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert {"summary.csv", "summary.md", "multirun.yaml"} <= names


def test_optuna_goes_on_after_failed_trials_and_minimises_as_the_recipe_says(
    both: dict[str, Ended],
) -> None:
    study = both["study"]
    assert study.code == 1, study.launch.err
    rows = study.summary()
    assert len(rows) == 4 and {row["status"] for row in rows} == {"FINISHED", "FAILED"}
    assert all(
        ("seed=-1" in row["overrides"].split()) == (row["status"] == "FAILED") for row in rows
    )
    best = yaml.safe_load((study.folder / "optimization_results.yaml").read_text())["best_value"]
    assert best == float(rows[0]["objective"])


def test_nothing_of_a_sweep_stays(both: dict[str, Ended]) -> None:
    for sweep in both.values():
        sweep.launch.nothing_is_left()


def test_ctrl_c_ends_the_whole_sweep_and_says_so_everywhere(tmp_path: Path) -> None:
    launch = WholeRun(tmp_path, "-m", *SFT, "num_steps=100000", "seed=1,2")
    try:
        wait_until(
            lambda: bool(list(tmp_path.glob("sweeps/*/0/metrics.jsonl"))), 300, lambda: launch.err
        )
        launch.press_ctrl_c()
        ended = Ended(launch, launch.wait(120))
        assert ended.code == 130, launch.err
        assert [row["status"] for row in ended.summary()] == ["KILLED"]
        assert ended.parent().info.status == "KILLED"
        assert [run.info.status for run in ended.children().values()] == ["KILLED"]
        assert "sweep of 1 job" in launch.out
        launch.nothing_is_left()
    finally:
        launch.end()
