"""One job of a sweep, in whichever process it runs: its end is recorded, good or bad."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.types import RunMode

from rlpost.cli import readable_errors
from rlpost.cluster.slurm_job import lends_its_node
from rlpost.errors import ConfigError, RlpostError, StoppedError
from rlpost.sweeps import record, session
from rlpost.sweeps.interrupt import heed_the_leader
from rlpost.sweeps.record import JobRecord, JobStatus

__all__ = ["Job", "as_job", "whole_sweep"]

whole_sweep = session.whole_sweep
Start = Callable[[Any, Path, bool], float | None]


def as_job(node: Any, hydra: Any, start: Start) -> float | None:
    """Calls `start(node, run_dir, in_sweep)`; its errors go to the user, or to the sweep."""
    run_dir = Path(hydra.runtime.output_dir)
    if hydra.mode is not RunMode.MULTIRUN or lends_its_node(os.environ):
        with readable_errors():
            return start(node, run_dir, False)
    job = Job(
        number=hydra.job.num,
        folder=run_dir,
        overrides=tuple(hydra.overrides.task),
        plan=node.plan is True,
        stop_sweep=node.stop_sweep_on_failure is True,
    )
    return job.run(lambda: start(node, run_dir, True))


@dataclass(frozen=True)
class Job:
    """`stop_sweep`: whether its failure ends the sweep; `plan`: whether it only prints its plan."""

    number: int
    folder: Path
    overrides: tuple[str, ...]
    plan: bool
    stop_sweep: bool

    def __post_init__(self) -> None:
        self._write("RUNNING", None, 0.0, "")

    def _write(
        self, status: JobStatus, objective: float | None, seconds: float, reason: str
    ) -> None:
        record.write(
            JobRecord(
                job=self.number,
                folder=str(self.folder),
                overrides=self.overrides,
                status=status,
                objective=objective,
                seconds=seconds,
                reason=reason,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
        )

    def run(self, start: Callable[[], float | None]) -> float | None:
        """What `start` returns, or None when it fails or has no number to return.

        Hydra's sweepers end at an exception, and at a NaN; None leaves them to go on. Ctrl-C does
        end the sweep.
        """
        began = time.monotonic()
        status: JobStatus = "FAILED"
        reason, objective = "", None
        try:
            heed_the_leader()
            objective = number(start())
            status = "PLANNED" if self.plan else "FINISHED"
            reason = "" if self.plan or objective is not None else "the objective has no value"
        except KeyboardInterrupt:
            status, reason = "KILLED", "interrupted"
            raise
        except StoppedError as error:
            status, reason = "KILLED", str(error)
            if session.led_here():
                raise KeyboardInterrupt from error  # the warning was to the whole sweep
        except Exception as error:
            reason = told(error)
            self.fail(error, reason)
        finally:
            self._write(status, objective, time.monotonic() - began, reason)
        return objective

    def fail(self, error: Exception, reason: str) -> None:
        """Says what went wrong, and raises if the sweep is to end."""
        if not isinstance(error, RlpostError):
            traceback.print_exception(error)
        print(f"\njob {self.number} failed: {reason}", file=sys.stderr, flush=True)
        if self.stop_sweep:
            # In the sweep's own process only something that is no Exception gets past Hydra.
            raise SystemExit(1) if session.led_here() else error


def number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def told(error: Exception) -> str:
    """On one line if it can be: it stands in a table."""
    text = "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)
    return f"{type(error).__name__}: {text}"
