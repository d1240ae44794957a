"""A terminal's Ctrl-C, where each job of a sweep is a process that submitit controls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LEADER = """
import sys, time
from pathlib import Path
import submitit
from rlpost.sweeps import session

folder = Path(sys.argv[1])

def work():
    from rlpost.sweeps.job import Job

    def start():
        (folder / "started").touch()
        try:
            time.sleep(60)
        finally:
            time.sleep(1.6)  # submitit alone would give it one second
            (folder / "closed").touch()

    Job(0, folder / "0", (), plan=False, stop_sweep=False).run(start)

with session.whole_sweep():
    sweep = session.Sweep(folder, None, [], [], jobs_apart=True)
    session.lead(sweep)
    sweep.begin("sweep", {})
    executor = submitit.AutoExecutor(cluster="local", folder=str(folder / ".submitit/%j"))
    executor.submit(work).results()
"""


@pytest.mark.parametrize("job_is", ["started", "starting"])
def test_a_job_has_the_time_to_end(job_is: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEADER, str(tmp_path)]
    sign = {"started": tmp_path / "started", "starting": tmp_path / ".submitit"}[job_is]
    with subprocess.Popen(
        command, start_new_session=True, preexec_fn=heed_sigint, stderr=subprocess.PIPE
    ) as leader:
        wait_for(sign)
        os.killpg(leader.pid, signal.SIGINT)
        _, err = leader.communicate(timeout=30)
    assert err.rstrip().endswith(b"KeyboardInterrupt"), err
    assert (tmp_path / "closed").exists() or job_is == "starting"
    assert "| KILLED |" in (tmp_path / "summary.md").read_text()


def heed_sigint() -> None:
    """Tests that a script started in the background inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.05)
