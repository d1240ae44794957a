"""Ends jobs that a launcher has put into processes of their own.

A terminal's Ctrl-C goes to every process of its foreground group: the one that leads the sweep,
each job, and between them submitit's controllers, which at a Ctrl-C kill their jobs after a second.
So the controllers never see one, and the jobs only that of the leader, which gives them time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rlpost.sweeps.record import JobRecord, read_all

INTERRUPT_S = 60.0  # for jobs to stop their engines and close their trackers
LOOK_EVERY_S = 0.5


@contextlib.contextmanager
def shielding_children() -> Iterator[None]:
    """Processes that this thread starts inside have SIGINT blocked; this process still heeds it.

    A mask is inherited, a handler is not. Another thread receives the signal, whose handler Python
    runs in the main thread.
    """
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True, name="receives-sigint").start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        done.set()


def heed_the_leader() -> None:
    """In a job's process: what the leader has sent so far, or sends from here on, arrives.

    Does nothing where SIGINT is not blocked: the job has no such leader.
    """
    if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        os.setpgid(0, 0)  # out of the terminal's reach, whose Ctrl-C would be a second one
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def interrupt_jobs(folder: Path) -> None:
    """One Ctrl-C for each job in another process of this machine; waits until they have ended.

    A job that its launcher is only starting gets it as soon as it is recorded.
    """
    told: set[int] = set()
    end = time.monotonic() + INTERRUPT_S
    while time.monotonic() < end:
        running = {item.pid for item in read_all(folder) if runs_beside(item)}
        for pid in running - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        told |= running
        if not running and not launches(folder):
            return
        time.sleep(LOOK_EVERY_S)


def runs_beside(record: JobRecord) -> bool:
    """Whether it is a running job in another process of this machine."""
    here = record.host == socket.gethostname() and record.pid != os.getpid()
    return here and record.status == "RUNNING" and alive(record.pid)


def launches(folder: Path) -> bool:
    """Whether submitit has processes here for the sweep in `folder`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = path.read_bytes().decode(errors="replace").split("\0")
            if any(word.startswith("submitit.") for word in words) and any(
                word.startswith(f"{folder}/") for word in words
            ):
                return True
    return False


def ended(record: JobRecord) -> bool:
    """Whether the job's process is known to be gone; of another machine's that is not known."""
    return record.host == socket.gethostname() and not alive(record.pid)


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be asked for its code does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
