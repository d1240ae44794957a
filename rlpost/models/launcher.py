"""`launch.py` as a child process: its composed configuration, and a run with its output shown."""

from __future__ import annotations

import collections
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import rlpost
from rlpost.errors import ModelError

TAIL_LINES = 30
GRACE_S = 20.0  # from Ctrl-C to kill: time for a run to stop its engines and close its tracker
COMPOSE_S = 120.0


class Launcher:
    """One command line of launch.py."""

    def __init__(self, arguments: Sequence[str]) -> None:
        script = Path(rlpost.__file__).parents[1] / "launch.py"
        if not script.is_file():
            raise ModelError(
                f"there is no {script}: a warm start runs launch.py, so install with pip install -e"
            )
        self.command = [sys.executable, "-u", str(script), *arguments]

    def composed(self) -> str:
        """The run's whole configuration as YAML, nothing started. Raises ModelError."""
        command = [*self.command, "--cfg", "job", "--resolve"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPOSE_S)
        except subprocess.TimeoutExpired as error:
            raise ModelError(f"{self} was not composed within {COMPOSE_S:g} s") from error
        if done.returncode:
            raise ModelError(f"{self} can't be composed:\n{done.stderr.strip()[-2000:]}")
        return done.stdout

    def run(self, run_dir: Path, *, timeout_s: float) -> None:
        """Runs to the end, each line going to our stdout and to `run_dir`/console.log.

        Raises ModelError with the last lines when it fails or passes `timeout_s`.
        """
        command = [*self.command, f"hydra.run.dir={quoted(run_dir)}"]
        late = threading.Event()
        with (
            (run_dir / "console.log").open("w", encoding="utf-8") as log,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # Else a terminal's Ctrl-C reaches the child twice: from the terminal and from us.
                start_new_session=True,
            ) as child,
        ):
            alarm = threading.Timer(timeout_s, expire, [child, late])
            alarm.start()
            try:
                tail = shown(child, log)
                code = child.wait()
            finally:
                alarm.cancel()
                stop(child)
        if late.is_set() or code:
            longer = f"took longer than timeout_s ({timeout_s:g})"
            reason = longer if late.is_set() else f"ended with {code}"
            raise ModelError(
                f"{self} {reason}; the whole output is in {run_dir}/console.log, its end:\n"
                + "".join(tail)
            )

    def __str__(self) -> str:
        return " ".join(["python", "launch.py", *self.command[3:]])


def shown(child: subprocess.Popen[str], log: TextIO) -> Sequence[str]:
    """Copies the child's lines to our stdout and to `log` until it ends; returns the last ones."""
    tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
    assert child.stdout is not None
    for line in child.stdout:
        print(f"  | {line}", end="", flush=True)
        log.write(line)
        tail.append(line)
    return tail


def expire(child: subprocess.Popen[str], late: threading.Event) -> None:
    """Runs in the timer's thread when the time is over."""
    late.set()
    stop(child)


def stop(child: subprocess.Popen[str]) -> None:
    """Ctrl-C, then kill. Does nothing to a process that has ended."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()


def quoted(path: Path) -> str:
    """`path` as a Hydra override value, whatever characters it holds."""
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
