"""A process that outlives the driver: when that dies without a word, it records the end.

Nothing inside a process can answer SIGKILL, the kernel's out-of-memory killer or a crash of the
interpreter. The guard reads a pipe from the driver. Its end without a goodbye means that the
driver is gone, and the wills that it left are carried out, in order.
"""

from __future__ import annotations

import importlib
import json
import logging
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger(__name__)

GOODBYE = "goodbye"
EXIT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Will:
    """A call to make when the driver has died.

    Will("rlpost.tracking.mlflow_store.end_lost_run", {"run_id": "4f1c", ...})
    """

    function: str
    arguments: dict[str, Any]  # what JSON can hold


class Guard:
    """The driver's side. Inside the `with` block `add` may be called from any thread.

    `dismiss` is the goodbye, once the trackers are closed. A block that is left without it, as by
    a second Ctrl-C while they close, leaves the rest to the guard.
    """

    def __init__(self, log: Path) -> None:
        self._log = log  # made only when there are wills to carry out
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._dismissed = False

    def __enter__(self) -> Guard:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlpost.tracking.guard", str(self._log.absolute())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # what kills the driver's group, as Ctrl-C may, spares it
        )
        return self

    def add(self, will: Will) -> None:
        self._say(json.dumps(asdict(will)))

    def dismiss(self) -> None:
        """Does nothing outside of the block."""
        if self._process is not None:
            self._say(json.dumps(GOODBYE))
            self._dismissed = True

    def __exit__(self, *_: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.close()
            if self._dismissed:
                self._process.wait(EXIT_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None, "not started"
        try:
            with self._lock:
                print(line, file=self._process.stdin, flush=True)
        except OSError as error:
            logger.warning(
                "the process that would record the end of a killed run is gone (%s); should this "
                "run be killed, trackers will show it as running",
                error,
            )


def main(log: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the driver; its end is what counts
    wills = left_behind(sys.stdin)
    if wills:
        log.parent.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(message)s")
        logger.info("the driver ended without closing its trackers")
        for will in wills:
            carry_out(will)


def left_behind(pipe: TextIO) -> list[Will]:
    """The wills of a driver that died; none if it said goodbye. Returns when the pipe ends."""
    wills: list[Will] = []
    for line in pipe:
        if not line.endswith("\n"):
            break  # the driver died within this line
        message = json.loads(line)
        if message == GOODBYE:
            return []
        wills.append(Will(**message))
    return wills


def carry_out(will: Will) -> None:
    module, _, name = will.function.rpartition(".")
    try:
        getattr(importlib.import_module(module), name)(**will.arguments)
    except Exception:  # one tracker's trouble must not keep the others from ending
        logger.exception("%s failed", will.function)
    else:
        logger.info("%s done", will.function)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
