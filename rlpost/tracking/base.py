"""The contract of a tracker: where params, metrics and the final status go.

Every implementation passes tests/contract/test_tracking.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker(Protocol):
    """A sink of a run. `close` is called exactly once, on every kind of exit."""

    def start(self, *, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Must not block the loop on I/O to a remote place."""

    def artifact(self, path: Path) -> None: ...

    def close(self, status: RunStatus) -> None: ...

    def report(self) -> Mapping[str, str]:
        """What the user should find at the end: label -> place or command. Asked after `close`."""


class ChosenTracker(Tracker, Protocol):
    """An option of the group `tracking`: `__init__(config, *, resume_run_id, leave_will)`.

    `leave_will(Will(...))` names what is to be called should the driver be killed.
    """

    @property
    def run_id(self) -> str | None:
        """By which a resumed run finds its run again; None where there is no such thing."""
