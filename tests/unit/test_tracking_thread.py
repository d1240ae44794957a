"""The MLflow tracker beside its store: thread, queue, retries; no MLflow is imported here."""

import threading
import time

import pytest

from rlpost.errors import TrackingError
from rlpost.tracking import mlflow, mlflow_store, mlflow_words
from rlpost.tracking.mlflow import MlflowTracker, MlflowTrackerConfig


def config(**changes):
    values = {
        "tracking_uri": "sqlite:///unused/mlflow.db",
        "artifact_dir": None,
        "experiment": "unit",
        "max_queued": 2,
        "start_timeout_s": 5.0,
        "close_timeout_s": 5.0,
    }
    return MlflowTrackerConfig(**values | changes)


class FakeRun:
    """Stands for a run of the store; `gate` holds its writes up, `broken` makes them fail."""

    run_id = "run-1"
    driver = "driver-1"

    def __init__(self, *, broken=False):
        self.gate = threading.Event()
        self.gate.set()
        self.broken = broken
        self.rows = []
        self.calls = 0
        self.called = threading.Event()
        self.status = None

    def log(self, rows):
        self.calls += 1
        self.called.set()
        self.gate.wait(5.0)
        if self.broken:
            raise OSError("disk is full")
        self.rows += [(row.step, row.metrics) for row in rows]

    def end(self, status):
        self.status = status


@pytest.fixture
def wills():
    return []


@pytest.fixture
def started(monkeypatch, tmp_path, wills):
    """Starts a tracker on a given run, or on an error to raise."""

    def start(run, opens_at=None, **changes):
        def open_run(**arguments):
            if opens_at is not None:
                opens_at.wait(5.0)
            if isinstance(run, Exception):
                raise run
            return run

        monkeypatch.setattr(mlflow, "open_run", open_run)
        tracker = MlflowTracker(config(**changes), resume_run_id=None, leave_will=wills.append)
        tracker.start(run_name="r", run_dir=tmp_path, params={})
        return tracker

    return start


def test_close_writes_what_is_queued_and_then_the_status(started):
    run = FakeRun()
    tracker = started(run)
    tracker.log(1, {"a": 1.0})
    tracker.close("KILLED")
    assert (run.rows, run.status) == ([(1, {"a": 1.0})], "KILLED")


def test_an_opened_run_leaves_word_how_to_end_it(started, wills, tmp_path):
    tracker = started(FakeRun())
    tracker.close("FINISHED")
    (will,) = wills
    assert will.function == "rlpost.tracking.mlflow_store.end_lost_run"
    assert will.arguments == {
        "tracking_uri": "sqlite:///unused/mlflow.db",
        "run_id": "run-1",
        "driver": "driver-1",
        "run_dir": str(tmp_path),
    }


def test_rows_that_wait_are_written_together_and_in_order(started):
    run = FakeRun()
    run.gate.clear()
    tracker = started(run, max_queued=100)
    for step in range(5):
        tracker.log(step, {"a": float(step)})
    run.gate.set()
    tracker.close("FINISHED")
    assert [step for step, _ in run.rows] == list(range(5))
    assert run.calls <= 2  # the first may have been under way when the others came


def test_a_store_that_cannot_be_opened_is_an_error(started, caplog):
    tracker = started(OSError("unable to open database file"))
    with pytest.raises(TrackingError, match=r"unable to open database.*tracking=none"):
        tracker.log(0, {})
    tracker.close("FAILED")
    assert not caplog.records  # it was told once


def test_a_store_that_is_not_there_in_time_is_waited_for_once(started):
    gate = threading.Event()
    tracker = started(FakeRun(), start_timeout_s=0.1, opens_at=gate)
    with pytest.raises(TrackingError, match=r"within 0\.1 s.*tracking=none"):
        tracker.log(0, {})
    tracker._start_timeout_s = 60.0
    began = time.monotonic()
    tracker.close("FAILED")
    gate.set()
    assert time.monotonic() - began < 30


def test_failing_writes_warn_once_and_training_goes_on(started, caplog):
    run = FakeRun(broken=True)
    tracker = started(run, max_queued=10)
    for step in range(3):
        tracker.log(step, {"a": 1.0})
    tracker.close("FINISHED")
    assert run.status == "FINISHED"
    assert [r.getMessage() for r in caplog.records if "disk is full" in r.getMessage()]
    assert len(caplog.records) == 1
    assert tracker.report()["MLflow lacks"].startswith("3 rows")


def test_a_slow_store_never_blocks_the_loop_and_lost_rows_are_counted(started):
    run = FakeRun()
    run.gate.clear()
    tracker = started(run)
    tracker.log(0, {"a": 1.0})
    assert run.called.wait(5.0)
    for step in range(1, 10):
        tracker.log(step, {"a": 1.0})
    run.gate.set()
    tracker.close("FINISHED")
    assert len(run.rows) == 3  # one was being written, two waited
    assert tracker.report()["MLflow lacks"].startswith("7 rows")
    assert run.rows[-1][1]["tracking/dropped/count"] >= 1


def test_a_stuck_store_does_not_hold_up_the_end_of_the_run(started, caplog):
    run = FakeRun()
    run.gate.clear()
    tracker = started(run, close_timeout_s=0.1)
    tracker.log(1, {})
    tracker.close("FINISHED")
    run.gate.set()
    assert "tracking.mlflow.close_timeout_s" in caplog.text


def test_address_without_scheme_is_refused():
    with pytest.raises(ValueError, match=r"tracking_uri \('outputs/mlflow.db'\).*sqlite:///"):
        config(tracking_uri="outputs/mlflow.db")


@pytest.mark.parametrize("scheme", ["https", "postgresql", "mysql+pymysql"])
def test_a_password_in_an_address_is_refused(scheme):
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_PASSWORD") as error:
        config(tracking_uri=f"{scheme}://me:hunter2@host/runs")
    assert "hunter2" not in str(error.value)


def test_names_and_values_that_are_too_long_are_cut_to_what_mlflow_takes():
    assert len(mlflow_words.entity_name("x" * 300 + ".lr")) == 250
    assert mlflow_words.entity_name("reward/own+mine(1)") == "reward/own_mine_1_"
    assert mlflow_words.param_value("x" * 7000) == "x" * 5997 + "..."


def test_params_are_flat_with_dotted_names():
    nested = {"seed": 1, "loop": {"colocate": False, "empty": {}}, "sizes": [1, 2]}
    flat = {"seed": 1, "loop.colocate": False, "loop.empty": {}, "sizes": [1, 2]}
    assert mlflow_words.flatten(nested) == flat


def test_a_locked_database_is_tried_again(monkeypatch):
    waits = []
    monkeypatch.setattr(mlflow_store.time, "sleep", waits.append)
    answers = iter([OSError("database is locked"), OSError("database is locked"), "done"])

    def call():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert mlflow_store.retried(call) == "done"
    assert waits == sorted(waits) and len(waits) == 2


def test_other_errors_are_not_tried_again(monkeypatch):
    monkeypatch.setattr(mlflow_store.time, "sleep", lambda seconds: pytest.fail("waited"))

    def call():
        raise OSError("disk is full")

    with pytest.raises(OSError, match="disk is full"):
        mlflow_store.retried(call)
