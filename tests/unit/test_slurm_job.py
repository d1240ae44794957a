"""A Slurm job as its tasks see it: environment, script, meeting, warnings, and going on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlpost.cluster import slurm
from rlpost.cluster.meeting import Meeting, joined
from rlpost.cluster.signals import StopRequest, heeding_warnings
from rlpost.cluster.slurm_job import SlurmTask, address_toward, term_patience_s
from rlpost.config import build, load
from rlpost.errors import ClusterError, ConfigError, StoppedError
from rlpost.job import going_on
from rlpost.overrides import compose_node

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


def test_a_task_knows_its_place_in_the_job() -> None:
    task = SlurmTask.of(SLURM)
    task.check(num_nodes=2)
    assert (task.name, task.leads) == ("7.0.0", False)
    assert SlurmTask.of(SLURM | {"SLURM_PROCID": "0", "SLURM_RESTART_COUNT": "2"}).name == "7.0.2"


@pytest.mark.parametrize(
    ("environment", "num_nodes", "said"),
    [
        ({}, 2, "no Slurm job; submit it"),
        ({"SLURM_JOB_ID": "7"}, 2, "put `srun` before"),
        (SLURM, 3, r"num_nodes \(3\) is not what Slurm gave \(2\)"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "8"}, 2, "one on each .--ntasks-per-node=1"),
    ],
)
def test_a_job_of_another_shape_is_refused(
    environment: dict[str, str], num_nodes: int, said: str
) -> None:
    with pytest.raises(ClusterError, match=said):
        SlurmTask.of(environment).check(num_nodes)


def test_the_own_address_is_the_one_toward_the_other_nodes() -> None:
    assert address_toward("127.0.0.1") == "127.0.0.1"


# -- script ----------------------------------------------------------------------------------


def slurm_config(*overrides: str) -> Any:
    return load(compose_node(["cluster=slurm", "cluster.num_nodes=2", *overrides]))


def test_the_script_starts_the_run_on_each_node(tmp_path: Path) -> None:
    config = slurm_config(
        "cluster.num_gpus_per_node=4",
        "cluster.time_limit_min=90",
        "+cluster.sbatch.partition=gpu",
        "+cluster.sbatch.cpus_per_task=12",
        "+cluster.sbatch.exclusive=true",
    )
    cluster = build(config.cluster, log_dir=tmp_path)
    command = ["python", "launch.py", "run_name=a b"]
    text = cluster.render(name="mine", run_dir=tmp_path, command=command).read_text()
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=mine\n#SBATCH --nodes=2\n")
    for line in (
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --time=90",
        "#SBATCH --signal=USR2@300",
        "#SBATCH --requeue",
        "#SBATCH --partition=gpu",
        "#SBATCH --exclusive",
        f"cd {Path.cwd()}",
        "srun python launch.py 'run_name=a b'",
    ):
        assert line in text.splitlines()


def test_no_gpus_are_asked_for_where_none_are_wanted(tmp_path: Path) -> None:
    cluster = build(slurm_config().cluster, log_dir=tmp_path)
    text = cluster.render(name="mine", run_dir=tmp_path, command=["x"]).read_text()
    assert "--gpus" not in text


def test_a_warning_that_comes_before_the_job_starts_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be less than time_limit_min"):
        slurm_config("cluster.time_limit_min=5", "cluster.signal_delay_s=300")


# -- meeting ---------------------------------------------------------------------------------


def test_the_others_learn_rays_address_and_the_leaders_end(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "job.json"
    meeting = Meeting(file, "127.0.0.1", secret="token")
    meeting.open()
    with joined(file, 5.0) as early, joined(file, 5.0) as other:
        assert early.secret == "token" and file.stat().st_mode & 0o077 == 0
        meeting.announce("127.0.0.1:6379")
        with joined(file, 5.0) as late:
            assert early.ray_address() == late.ray_address() == "127.0.0.1:6379"
        assert not early.leader_has_ended(0.05)
        meeting.close()
        assert early.leader_has_ended(5.0)
        assert other.ray_address() == "127.0.0.1:6379"  # said before the end, read after it
    assert not file.exists()


def test_a_leader_that_ends_before_ray_is_there_gives_no_address(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path / "job.json", "127.0.0.1", secret="token")
    meeting.open()
    with joined(tmp_path / "job.json", 5.0) as guest:
        meeting.close()
        assert guest.ray_address() is None


def test_a_leader_whose_node_has_no_way_to_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_way(*_: Any) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", no_way)
    (tmp_path / "job.json").write_text('{"host": "n1", "port": 1, "secret": ""}')
    with (
        pytest.raises(ClusterError, match=r"did not show up .*No route to host"),
        joined(tmp_path / "job.json", 0.1),
    ):
        pass


def test_a_leader_that_does_not_come_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match=r"did not show up at .*job\.json within 0\.1 s"),
        joined(tmp_path / "job.json", 0.1),
    ):
        pass


@pytest.mark.parametrize("closing_s", [5.0, 0.1])
def test_ray_may_end_on_a_node_before_the_leader_does(
    closing_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "CLOSING_S", closing_s)
    monkeypatch.setattr(slurm, "LOOK_EVERY_S", 0.05)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    cluster = build(slurm_config().cluster, log_dir=tmp_path)
    monkeypatch.setattr(cluster, "_ray_start", lambda *_: [sys.executable, "-c", ""])
    meeting = Meeting(tmp_path / "job.json", "127.0.0.1", secret="token")
    meeting.open()
    close = threading.Timer(1.0, meeting.close)
    close.start()
    given_up = pytest.raises(ClusterError, match=r"Ray ended on this node.*node-1\.log")
    with joined(tmp_path / "job.json", 5.0) as guest, given_up if closing_s < 1 else nullcontext():
        cluster._join("127.0.0.1:1", guest)
    close.join()


# Stands in for `ray start`: SIGTERM ends it, and not its daemon, which has a log in Ray's folder.
RAY_START = """
import subprocess, sys, time
log = open(sys.argv[1] + "/daemon.log", "w")
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
print(subprocess.Popen([sys.executable, "-c", code], stdout=log).pid, flush=True)
time.sleep(60)
"""


def test_a_daemon_that_outlives_ray_start_is_gone_when_the_node_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "LOOK_EVERY_S", 0.05)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    cluster = build(slurm_config().cluster, log_dir=tmp_path)
    monkeypatch.setattr(
        cluster, "_ray_start", lambda _, folder: [sys.executable, "-c", RAY_START, folder]
    )
    meeting = Meeting(tmp_path / "job.json", "127.0.0.1", secret="token")
    meeting.open()
    said = tmp_path / "node-1.log"

    def close_when_it_is_there() -> None:
        while not said.exists() or not said.read_text():
            time.sleep(0.05)
        meeting.close()

    close = threading.Thread(target=close_when_it_is_there, daemon=True)
    close.start()
    with joined(tmp_path / "job.json", 5.0) as guest:
        cluster._join("127.0.0.1:1", guest)
    assert not _alive(int(said.read_text()))


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


# -- warnings --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_is_noted_passed_on_and_not_seen_by_children(number: int) -> None:
    heard: list[Any] = []
    before = signal.signal(number, lambda *_: heard.append("listener"))
    try:
        with heeding_warnings() as stop:
            assert not stop.came
            child = f"import os, signal; os.kill(os.getpid(), {int(number)}); print('alive')"
            said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
            os.kill(os.getpid(), number)
            assert stop.came and not heard
        stop.pass_on(lambda: heard.append("requeue"))
        assert said.stdout == "alive\n"
        assert heard == ["listener"]
    finally:
        signal.signal(number, before)


def test_where_nobody_listened_the_job_is_queued_again() -> None:
    heard: list[str] = []
    with heeding_warnings() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
    stop.pass_on(lambda: heard.append("requeue"))
    assert stop.came and heard == ["requeue"]
    assert not StopRequest().came


def test_sigterm_in_a_job_waits_for_the_step_and_queues_nothing_again() -> None:
    assert term_patience_s({}) is None
    listening = heeding_warnings(term_patience_s(SLURM))
    with pytest.raises(KeyboardInterrupt), listening as stop, stop.before_the_end():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.came
        raise StoppedError("asked to stop at step 3")


def test_sigterm_interrupts_a_step_that_is_too_long() -> None:
    with pytest.raises(KeyboardInterrupt), heeding_warnings(0.2) as stop, stop.before_the_end():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)


def test_sigterm_is_left_alone_outside_of_a_job_and_after_the_last_step() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with heeding_warnings(None) as stop, stop.before_the_end():
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [signal.SIGTERM] and not stop.came
        with heeding_warnings(0.1) as stop:
            with stop.before_the_end():
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # closing is not interrupted any more
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


# -- going on --------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run that saved after step 2 and was lost in step 4; its last row is half written."""
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        (folder / "state.json").write_text(json.dumps({"step": step}))
    (tmp_path / "checkpoints" / "step_000003").mkdir()
    rows = [{"step": step} for step in (0, 1, 2, 3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 4, "tr')
    return tmp_path


def test_a_run_goes_on_from_the_newest_checkpoint_of_its_folder(run_dir: Path, capsys: Any) -> None:
    config = load(compose_node([]))
    newest = run_dir / "checkpoints" / "step_000002"
    assert going_on(config, run_dir) == replace(config, resume_from=str(newest))
    assert f"going on from {newest}" in capsys.readouterr().out
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1, 2]


def test_a_run_that_saved_nothing_starts_its_rows_anew(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    config = load(compose_node([]))
    assert going_on(config, run_dir) == config
    assert (run_dir / "metrics.jsonl").read_text() == ""


def test_a_new_folder_and_an_explicit_checkpoint_change_nothing(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(compose_node([]))
    assert going_on(config, tmp_path / "new") == config
    explicit = replace(config, resume_from="elsewhere")
    assert going_on(explicit, run_dir) == explicit
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # queued again: what it did since counts
    assert going_on(explicit, run_dir).resume_from != "elsewhere"
