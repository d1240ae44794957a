"""The MLflow tracker on a real SQLite store."""

import os
import subprocess
import sys
import time

import pytest

from rlpost.errors import TrackingError
from rlpost.tracking.mlflow import MlflowTracker, MlflowTrackerConfig

RUN = """
import sys
from pathlib import Path
from rlpost.tracking.mlflow import MlflowTracker, MlflowTrackerConfig
folder, name = sys.argv[1:]
tracker = MlflowTracker(MlflowTrackerConfig(
    tracking_uri=f"sqlite:///{folder}/mlflow.db", artifact_dir=f"{folder}/artifacts",
    experiment="together", max_queued=100, start_timeout_s=120.0, close_timeout_s=60.0),
    resume_run_id=None, leave_will=lambda will: None)
tracker.start(run_name=name, run_dir=Path(folder), params={"name": name})
for step in range(20):
    tracker.log(step, {"rollout/reward/mean": step / 10})
tracker.close("FINISHED")
"""


def tracker_on(folder, *, uri=None, resume_run_id=None, leave_will=lambda will: None):
    config = MlflowTrackerConfig(
        tracking_uri=uri or f"sqlite:///{folder}/mlflow.db",
        artifact_dir=str(folder / "artifacts"),
        experiment="together",
        max_queued=100,
        start_timeout_s=120.0,
        close_timeout_s=60.0,
    )
    return MlflowTracker(config, resume_run_id=resume_run_id, leave_will=leave_will)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store on which two processes started, at the same time, from nothing."""
    folder = tmp_path_factory.mktemp("store")
    command = [sys.executable, "-c", RUN, str(folder)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    runs = [subprocess.Popen([*command, name], **pipes) for name in ("a", "b")]
    errors = [run.communicate(timeout=120)[1].decode() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    assert errors == ["", ""]
    return folder


def client(folder):
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{folder}/mlflow.db")


def runs_of(folder):
    reader = client(folder)
    experiment = reader.get_experiment_by_name("together")
    return {run.info.run_name: run for run in reader.search_runs([experiment.experiment_id])}


def test_runs_side_by_side_share_one_store_without_loss(store):
    for name in ("a", "b"):
        run = runs_of(store)[name]
        history = client(store).get_metric_history(run.info.run_id, "rollout/reward/mean")
        assert [(m.step, m.value) for m in history] == [(s, s / 10) for s in range(20)]
        assert (run.info.status, run.data.params) == ("FINISHED", {"name": name})


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_the_true_final_status_is_kept(store, tmp_path, status):
    artifact = tmp_path / "plan.txt"
    artifact.write_text("plan")
    tracker = tracker_on(store)
    tracker.start(run_name=status, run_dir=tmp_path, params={"loop": {"colocate": True}})
    tracker.artifact(artifact)
    tracker.close(status)
    run = client(store).get_run(tracker.run_id)
    assert (run.info.status, run.data.params) == (status, {"loop.colocate": "True"})
    assert [a.path for a in client(store).list_artifacts(tracker.run_id)] == ["plan.txt"]


def test_a_resumed_run_goes_on_in_its_mlflow_run(store, tmp_path):
    before = runs_of(store)["a"]
    tracker = tracker_on(store, resume_run_id=before.info.run_id)
    tracker.start(run_name="a", run_dir=tmp_path, params={"name": "changed", "more": 1})
    tracker.log(20, {"rollout/reward/mean": 2.0})
    tracker.close("FINISHED")
    after = runs_of(store)["a"]
    assert tracker.run_id == before.info.run_id
    assert after.data.params == {"name": "a", "more": "1"}
    assert after.data.metrics["rollout/reward/mean"] == 2.0


def test_an_unknown_run_to_resume_starts_a_new_one(store, tmp_path):
    tracker = tracker_on(store, resume_run_id="0" * 32)
    tracker.start(run_name="moved", run_dir=tmp_path, params={})
    tracker.close("FINISHED")
    assert runs_of(store)["moved"].info.run_id == tracker.run_id


def test_a_server_that_is_not_there_is_told_at_once(tmp_path):
    tracker = tracker_on(tmp_path, uri="http://127.0.0.1:9")
    tracker.start(run_name="alone", run_dir=tmp_path, params={})
    started = time.monotonic()
    with pytest.raises(TrackingError, match=r"MLflow could not start: .*Connection refused"):
        tracker.log(0, {})
    assert time.monotonic() - started < 30
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
