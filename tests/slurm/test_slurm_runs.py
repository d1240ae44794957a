"""Runs through Slurm: two nodes, warnings, cancellation; each run proves several facts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_runs import (
    NODES,
    SCHEDULED_S,
    TWO_NODES,
    SlurmRun,
    ends_in,
    job,
    signals_tasks_alone,
    slurm,
)
from whole_run import GRPO, SFT, wait_until

BOTH_NODES = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def started() -> Iterator[list[SlurmRun]]:
    made: list[SlurmRun] = []
    try:
        yield made
    finally:
        for run in made:
            run.end()


def test_a_job_over_two_nodes_that_is_preempted_goes_on_and_finishes(
    tmp_path: Path, started: list[SlurmRun]
) -> None:
    """By `hydra/launcher=submitit_slurm`; an urgent job takes both nodes in the middle."""
    launch = ("-m", "hydra/launcher=submitit_slurm", *GRPO, *TWO_NODES, "num_steps=30")
    run = SlurmRun(tmp_path, *launch)
    started.append(run)
    wait_until(lambda: bool(run.jobs()), SCHEDULED_S, run.said)
    (job_id,) = run.jobs()
    run.wait_until_in_job(2, job_id)
    assert run.nodes_of("actor-0", "engine-0") == ["n1", "n2"]
    placement = json.loads((run.run_dir / "logs" / "placement.json").read_text())
    assert list(placement["nodes"]) == ["0", "1"]
    assert (placement["roles"]["actor"], placement["roles"]["engine"]) == ([0], [1])
    slurm("sbatch", "--partition=urgent", *BOTH_NODES, "--output=/dev/null", "--wrap=srun true")
    run.start_again_now(job_id)
    saved = run.last_step()
    assert 2 <= saved < 30 and run.checkpoint(saved).is_dir()
    run.finished()
    assert [row["step"] for row in run.metrics() if "train/loss" in row] == list(range(1, 31))
    assert f"going on from {run.checkpoint(saved)}" in run.said()
    own = [item for item in run.mlflow_runs() if item.data.tags["run_dir"] == str(run.run_dir)]
    assert [item.info.status for item in own] == ["FINISHED"]
    run.nothing_is_left()
    assert job(job_id)["ExitCode"] == "0:0"


def test_a_script_of_ones_own_reaches_its_time_limit_goes_on_and_finishes(
    tmp_path: Path, started: list[SlurmRun]
) -> None:
    """By `cluster.render` and sbatch. Steps last long enough for the warning to come in time."""
    slow = ("reward.parts.own.function._target_=own_rewards.Slow", "num_steps=50")
    run = SlurmRun(tmp_path, *GRPO, *TWO_NODES, *slow, "cluster.render=true")
    started.append(run)
    assert run.wait() == 0, run.err
    job_id = run.sbatch(Path(run.out.split()[-1]))
    run.wait_until_in_job(2, job_id)
    ends_in(job_id, seconds=80)
    run.start_again_now(job_id)
    saved = run.last_step()
    assert 2 <= saved < 50 and run.checkpoint(saved).is_dir()
    assert {item.info.status for item in run.mlflow_runs()} == {"KILLED"}
    slurm("scontrol", "update", f"JobId={job_id}", "TimeLimit=10")
    run.wait_until_in_job(50, job_id)
    wait_until(lambda: not run.jobs(), SCHEDULED_S, run.said)
    assert job(job_id)["JobState"] == "COMPLETED" and job(job_id)["Restarts"] == "1", run.said()
    assert [row["step"] for row in run.metrics() if "train/loss" in row] == list(range(1, 51))
    assert f"going on from {run.checkpoint(saved)}" in run.said()
    assert [item.info.status for item in run.mlflow_runs()] == ["FINISHED"]
    run.nothing_is_left()


def test_a_cancelled_job_saves_the_step_at_hand_and_does_not_come_back(
    tmp_path: Path, started: list[SlurmRun]
) -> None:
    run = SlurmRun(tmp_path, *SFT, *NODES, "num_steps=100000", "cluster.render=true")
    started.append(run)
    assert run.wait() == 0, run.err
    job_id = run.sbatch(Path(run.out.split()[-1]))
    run.wait_until_in_job(2, job_id)
    slurm("scancel", job_id)
    wait_until(lambda: not run.jobs(), SCHEDULED_S, run.said)
    assert job(job_id)["JobState"] == "CANCELLED" and job(job_id)["Restarts"] == "0"
    assert [item.info.status for item in run.mlflow_runs()] == ["KILLED"]
    if signals_tasks_alone():  # else Ray is ended at once, too
        assert run.checkpoint(run.last_step()).is_dir(), run.said()
    run.nothing_is_left()


def test_a_job_of_submitit_on_this_machine(tmp_path: Path, started: list[SlurmRun]) -> None:
    run = SlurmRun(tmp_path, "-m", "hydra/launcher=submitit_local", *SFT, "num_steps=2")
    started.append(run)
    run.finished()
    assert sorted(run.steps()) == [1, 2] and os.path.realpath(run.run_dir).endswith("/0")
    run.nothing_is_left()
