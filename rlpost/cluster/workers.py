"""Worker processes: one plain Python object each, called remotely, always with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rlpost.errors import DeadlineError, WorkerDiedError


@dataclass(frozen=True, slots=True)
class Placement:
    """Resources of one worker. `env` is set before the worker imports anything."""

    num_cpus: float
    num_gpus: float
    env: Mapping[str, str]


class Worker:
    """Handle of one remote object. `call` awaits a method of it."""

    def __init__(self, *, role: str, rank: int, actor: Any) -> None:
        self.role = role
        self.rank = rank
        self._actor = actor

    def __repr__(self) -> str:
        return f"{self.role}[{self.rank}]"

    async def call(self, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        """Calls `method` there. Raises what it raised, DeadlineError, or WorkerDiedError."""
        started = time.monotonic()
        ref = getattr(self._actor, method).remote(*args, **kwargs)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(ref.future()), deadline_s)
        except TimeoutError as error:
            waited = time.monotonic() - started
            raise DeadlineError(
                f"{self!r} did not answer {method}() within {waited:.0f} s "
                f"(deadline {deadline_s:g} s)"
            ) from error
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise WorkerDiedError(f"{self!r} died during {method}(): {error}") from error

    def kill(self) -> None:
        """Ends the process at once."""
        ray.kill(self._actor, no_restart=True)


class WorkerGroup:
    """The ranks of one role, called together."""

    def __init__(self, role: str, workers: Sequence[Worker]) -> None:
        self.role = role
        self.workers = list(workers)

    def __len__(self) -> int:
        return len(self.workers)

    async def call(self, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> list[Any]:
        """Calls all ranks at once; results in rank order. The first failure fails the call."""
        calls = [
            asyncio.create_task(worker.call(method, *args, deadline_s=deadline_s, **kwargs))
            for worker in self.workers
        ]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
