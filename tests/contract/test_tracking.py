"""What every tracker promises."""

import json

import pytest

from rlpost.tracking.console import ConsoleTracker
from rlpost.tracking.files import FilesTracker
from rlpost.tracking.mlflow import MlflowTracker, MlflowTrackerConfig
from rlpost.tracking.multi import MultiTracker
from rlpost.tracking.tensorboard import TensorboardTracker, TensorboardTrackerConfig

PARAMS = {"seed": 1, "loop": {"colocate": False, "steps": [1, 2]}, "none": None}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


def mlflow_tracker(store):
    return MlflowTracker(
        MlflowTrackerConfig(
            tracking_uri=f"sqlite:///{store}/mlflow.db",
            artifact_dir=str(store / "artifacts"),
            experiment="contract",
            max_queued=100,
            start_timeout_s=120.0,
            close_timeout_s=60.0,
        ),
        resume_run_id=None,
        leave_will=lambda will: None,
    )


def build(kind, run_dir, store):
    if kind == "files":
        return FilesTracker()
    if kind == "console":
        return ConsoleTracker(num_steps=3)
    if kind == "mlflow":
        return mlflow_tracker(store)
    if kind == "tensorboard":
        config = TensorboardTrackerConfig(100, 120.0, 60.0)
        return TensorboardTracker(config, resume_run_id=None, leave_will=lambda will: None)
    parts = {name: build(name, run_dir, store) for name in KINDS if name != "multi"}
    files, console = parts.pop("files"), parts.pop("console")
    return MultiTracker([files, console], parts, summary=console.summary, last_files=list)


KINDS = ("files", "console", "mlflow", "tensorboard", "multi")


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_run_is_accepted_and_reported(kind, tmp_path, store):
    tracker = build(kind, tmp_path, store)
    artifact = tmp_path / "plan.txt"
    artifact.write_text("plan")
    tracker.start(run_name="grpo", run_dir=tmp_path, params=PARAMS)
    tracker.artifact(artifact)
    for step in range(4):
        tracker.log(step, {"rollout/reward/mean": 0.5, "train/loss": float("nan")})
    tracker.close("FINISHED")
    assert all(isinstance(text, str) for text in tracker.report().values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_run_that_ends_before_its_first_step_closes(kind, status, tmp_path, store):
    tracker = build(kind, tmp_path, store)
    tracker.start(run_name="grpo", run_dir=tmp_path, params={})
    tracker.close(status)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_a_run_that_never_started_is_harmless(kind, tmp_path, store):
    build(kind, tmp_path, store).close("FAILED")


def test_metrics_file_holds_each_row_as_strict_json_at_once(tmp_path):
    tracker = build("files", tmp_path, tmp_path)
    tracker.start(run_name="grpo", run_dir=tmp_path, params={})
    tracker.log(3, {"rollout/reward/mean": 0.5, "train/loss": float("nan")})
    tracker.log(4, {"train/grad_norm": float("inf")})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 3, "rollout/reward/mean": 0.5, "train/loss": None},
        {"step": 4, "train/grad_norm": "inf"},
    ]
