"""A driver that is killed leaves the truth behind: its guard ends what it had opened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlpost.tracking import mlflow_store

# Opens a run as launch.py does, says so, and then waits to be killed or told to go on.
DRIVER = """
import sys
from pathlib import Path
from rlpost.tracking.guard import Guard
from rlpost.tracking.last_files import last_files_will
from rlpost.tracking.mlflow import MlflowTracker, MlflowTrackerConfig
from rlpost.tracking.timeline import Timeline
folder = Path(sys.argv[1])
with Guard(folder / "logs" / "guard.log") as guard:
    guard.add(last_files_will(folder))
    tracker = MlflowTracker(MlflowTrackerConfig(
        tracking_uri=f"sqlite:///{folder}/mlflow.db", artifact_dir=f"{folder}/artifacts",
        experiment="guarded", max_queued=100, start_timeout_s=120.0, close_timeout_s=60.0),
        resume_run_id=None, leave_will=guard.add)
    tracker.start(run_name="r", run_dir=folder, params={})
    Timeline(folder / "events.jsonl").add("train", 1.0, 2.0)
    print(tracker.run_id, flush=True)
    sys.stdin.readline()
    tracker.close("FINISHED")
    guard.dismiss()
"""


@pytest.fixture
def driver(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.communicate()


def run_of(folder, run_id):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    return client.get_run(run_id), {item.path for item in client.list_artifacts(run_id)}


def guards_of(folder):
    """Process ids of guards that write to a log below `folder`."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        except OSError:
            continue
        if "-m\0rlpost.tracking.guard" in command and str(folder) in command:
            found.append(int(pid))
    return found


def wait_for_the_guard(folder):
    end = time.monotonic() + 120
    while guards_of(folder):
        assert time.monotonic() < end, "the guard is still there"
        time.sleep(0.1)


def test_a_killed_driver_has_failed_and_its_last_files_are_there(driver, tmp_path):
    run_id = driver.stdout.readline().strip()
    assert len(guards_of(tmp_path)) == 1
    os.killpg(driver.pid, signal.SIGKILL)  # its whole group, as a batch system may
    wait_for_the_guard(tmp_path)
    run, artifacts = run_of(tmp_path, run_id)
    assert (run.info.status, artifacts) == ("FAILED", {"timeline.json"})
    log = (tmp_path / "logs" / "guard.log").read_text()
    assert "the driver ended without closing its trackers" in log and "Traceback" not in log


def test_a_driver_that_ends_by_itself_needs_no_guard(driver, tmp_path):
    run_id = driver.stdout.readline().strip()
    driver.communicate("\n", timeout=60)
    assert driver.returncode == 0
    wait_for_the_guard(tmp_path)
    assert run_of(tmp_path, run_id)[0].info.status == "FINISHED"
    assert not (tmp_path / "logs").exists()


def test_a_run_that_another_driver_has_resumed_is_left_alone(tmp_path):
    store = f"sqlite:///{tmp_path}/mlflow.db"
    options = {
        "tracking_uri": store,
        "artifact_dir": str(tmp_path / "artifacts"),
        "experiment": "guarded",
        "run_name": "r",
        "tags": {},
        "params": {},
    }
    first = mlflow_store.open_run(**options, resume_run_id=None)
    second = mlflow_store.open_run(**options, resume_run_id=first.run_id)
    lost = {"tracking_uri": store, "run_id": first.run_id, "run_dir": str(tmp_path)}
    mlflow_store.end_lost_run(**lost, driver=first.driver)
    assert run_of(tmp_path, first.run_id)[0].info.status == "RUNNING"
    mlflow_store.end_lost_run(**lost, driver=second.driver)
    assert run_of(tmp_path, first.run_id)[0].info.status == "FAILED"
