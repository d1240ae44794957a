"""Ends jobs that a launcher has put into processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from rlpost.sweeps.record import JobRecord, read_all

INTERRUPT_S = 60.0  # for jobs to stop their engines and close their trackers


def interrupt_jobs(folder: Path) -> None:
    """Ctrl-C for the jobs in other processes of this machine, which a terminal's did not reach."""
    here = socket.gethostname()
    running = [
        item
        for item in read_all(folder)
        if item.status == "RUNNING" and item.host == here and item.pid != os.getpid()
    ]
    for record in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGINT)
    end = time.monotonic() + INTERRUPT_S
    while any(alive(record.pid) for record in running) and time.monotonic() < end:
        time.sleep(0.2)


def ended(record: JobRecord) -> bool:
    """Whether the job's process is known to be gone; of another machine's that is not known."""
    return record.host == socket.gethostname() and not alive(record.pid)


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be asked for its code does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
