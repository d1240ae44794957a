"""Runs through Slurm: two nodes, warnings, cancellation; each run proves several facts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_runs import SCHEDULED_S, TWO_NODES, SlurmRun, job, slurm
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


def test_a_script_of_ones_own_is_warned_goes_on_and_is_cancelled(
    tmp_path: Path, started: list[SlurmRun]
) -> None:
    """By `cluster.render`, sbatch and scancel."""
    run = SlurmRun(tmp_path, *GRPO, *TWO_NODES, "num_steps=2000", "cluster.render=true")
    started.append(run)
    assert run.wait() == 0, run.err
    job_id = run.sbatch(Path(run.out.split()[-1]))
    run.wait_until_in_job(2, job_id)
    slurm("scancel", "--signal=USR2", job_id)
    run.start_again_now(job_id)
    saved = run.last_step()
    assert run.checkpoint(saved).is_dir()
    assert {item.info.status for item in run.mlflow_runs()} == {"KILLED"}
    run.wait_until_in_job(saved + 2, job_id)
    assert re.search(r"going on from \S+/checkpoints/step_", run.said())
    slurm("scancel", job_id)
    wait_until(lambda: not run.jobs(), SCHEDULED_S, run.said)
    run.nothing_is_left()
    (mlflow_run,) = run.mlflow_runs()
    assert mlflow_run.info.status in ("KILLED", "FAILED")
    assert not list(Path(run.temp_dir).glob("rlpost-ray-*"))


def test_a_job_of_submitit_on_this_machine(tmp_path: Path, started: list[SlurmRun]) -> None:
    run = SlurmRun(tmp_path, "-m", "hydra/launcher=submitit_local", *SFT, "num_steps=2")
    started.append(run)
    run.finished()
    assert sorted(run.steps()) == [1, 2] and os.path.realpath(run.run_dir).endswith("/0")
    run.nothing_is_left()
