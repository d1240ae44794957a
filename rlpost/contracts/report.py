"""What a check says: one line for each point of a contract."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A point of the contract; `problem` says what is wrong and what to change, "" if kept."""

    point: str
    problem: str = ""
    note: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"FAIL  {self.point}: {' '.join(self.problem.split())}"
        return f"PASS  {self.point}" + (f" ({self.note})" if self.note else "")


class Broken(Exception):
    """A point is not kept; raised inside `point`."""


Check = Callable[[], str | None]


def point(name: str, check: Check) -> Finding:
    """Runs `check`, which returns a note or raises Broken; whatever else it raises is a problem."""
    try:
        return Finding(name, note=check() or "")
    except Broken as broken:
        return Finding(name, problem=str(broken))
    # The class is foreign code: any failure is the finding, also that it would end the process.
    except (Exception, SystemExit) as error:
        return Finding(name, problem=f"it raised {type(error).__name__}: {error}")


def require(holds: Any, problem: str) -> None:
    if not holds:
        raise Broken(problem)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Ends what runs inside after `seconds`, also a loop without end. Main thread only."""

    def expire(*_: Any) -> None:
        raise Broken(f"one call takes longer than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def seconds_of(call: Callable[[], Any], limit_s: float) -> float:
    started = time.perf_counter()
    with limited(limit_s):
        call()
    return time.perf_counter() - started


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
