"""One reward process as its owner sees it. Blocking; used from one thread at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from rlpost.errors import BudgetError
from rlpost.rewards.base import RewardInputs, StepInputs
from rlpost.types import Verdict
from rlpost.validation import Section


class RewardProcess:
    """Starts at first use, is killed when a call passes its limit, and starts again."""

    def __init__(self, parts: Mapping[str, Section], *, start_timeout_s: float) -> None:
        self._parts = dict(parts)
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()  # close() comes from another thread
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Waits until the rewards are imported and built. Raises BudgetError if they can't be."""
        if self._process is not None:
            return
        self._spawn()
        verdict = self._ask(self._parts, self._start_timeout_s)
        if verdict.status != "ok":
            self.kill()
            raise BudgetError(
                f"the rewards ({', '.join(self._parts)}) can't be built: {verdict.detail}"
            )

    def _spawn(self) -> None:
        self._connection, theirs = Pipe()
        with self._lock:
            assert not self._closed, "the reward pool is closed"
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "rlpost.rewards.child",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # a reward's own subprocesses are killed with it
            )
        theirs.close()

    def judge(self, part: str, inputs: RewardInputs | StepInputs, *, timeout_s: float) -> Verdict:
        """One reward call, never longer than `timeout_s` (plus a restart when needed)."""
        self.start()
        verdict = self._ask((part, inputs), timeout_s)
        if verdict.status == "timeout":
            self.kill()
        return verdict

    def kill(self) -> None:
        """Ends the process and its children; the next call starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            end_session(process)
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Ends the process for good. A call under way in another thread sees it end."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                end_session(self._process)

    def _ask(self, message: object, timeout_s: float) -> Verdict:
        assert self._connection is not None, "the reward process is not started"
        try:
            self._connection.send(message)
            if not self._connection.poll(timeout_s):
                return Verdict(None, "timeout", f"no answer within {timeout_s:g} s")
            verdict: Verdict = self._connection.recv()
        except (EOFError, OSError):
            return Verdict(None, "error", f"the reward process ended {self._ending()}")
        return verdict

    def _ending(self) -> str:
        """How it ended. The dead process is cleared away, so that the next call starts anew."""
        process = self._process
        assert process is not None, "the reward process is not started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        self.kill()
        code = process.wait()
        return f"with exit code {code}" if code >= 0 else f"by signal {-code}"


def end_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
