"""Worker processes: one plain Python object each, called remotely, always with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.cluster.rendezvous import Rendezvous
from rlpost.errors import DeadlineError, RlpostError, WorkerDiedError
from rlpost.lazy import LazyModule
from rlpost.profiling import ProfileConfig

if TYPE_CHECKING:
    import ray
else:
    ray = LazyModule("ray")

DEATH_NOTICE_S = 10.0  # in which Ray tells that a process has ended


@dataclass(frozen=True, slots=True)
class Placement:
    """Resources of one worker. `env` is set before the hosted object is imported."""

    num_cpus: float
    num_gpus: float
    env: Mapping[str, str]


class Worker:
    """Handle of one remote object; picklable, so that workers can call each other."""

    def __init__(self, *, role: str, rank: int, actor: Any, log_path: str) -> None:
        self.role = role
        self.rank = rank
        self.log_path = log_path
        self._actor = actor

    def __repr__(self) -> str:
        return f"{self.role}[{self.rank}]"

    async def call(self, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        """Calls `method` there. Raises what it raised, DeadlineError, or WorkerDiedError."""
        return await self._wait(method, self._actor.call.remote(method, args, kwargs), deadline_s)

    async def create(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, deadline_s: float
    ) -> None:
        """Builds the hosted object."""
        name = getattr(target, "__name__", str(target))
        await self._wait(name, self._actor.create.remote(target, args, kwargs), deadline_s)

    async def pid(self, deadline_s: float = 30.0) -> int:
        return int(await self._wait("pid", self._actor.pid.remote(), deadline_s))

    async def rendezvous(self, deadline_s: float) -> Rendezvous:
        """Where the ranks of its role can meet, if this is the worker of rank 0."""
        ref = self._actor.rendezvous.remote()
        made: Rendezvous = await self._wait("rendezvous", ref, deadline_s)
        return made

    async def start_profile(self, config: ProfileConfig, *, deadline_s: float) -> None:
        await self._wait("start_profile", self._actor.start_profile.remote(config), deadline_s)

    async def stop_profile(self, trace: Path, *, deadline_s: float) -> dict[str, int]:
        """Writes the trace; returns peaks of memory, in bytes."""
        ref = self._actor.stop_profile.remote(trace)
        peaks: dict[str, int] = await self._wait("stop_profile", ref, deadline_s)
        return peaks

    async def _wait(self, method: str, ref: Any, deadline_s: float) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(ref.future()), deadline_s)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self!r} did not answer {method}() within {deadline_s:g} s; "
                f"its log is {self.log_path}"
            ) from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.OutOfMemoryError as error:
            raise WorkerDiedError(
                f"{self!r} was ended by Ray during {method}(), as the machine's memory was almost "
                f"full; use smaller micro-batches or fewer workers, or end what else runs there; "
                f"its log is {self.log_path}"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise WorkerDiedError(
                f"{self!r} died during {method}() (killed, crashed or out of memory); "
                f"its log is {self.log_path}"
            ) from error
        except ray.exceptions.RayError as error:  # the node died, or Ray freed its memory
            reason = str(error).partition("\n")[0]
            raise WorkerDiedError(
                f"{self!r} was lost during {method}(): {reason}; its log is {self.log_path}"
            ) from error

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
        """Calls all ranks at once; results in rank order. The first failure fails the call.

        The peers of a rank that died fail before its death is known, in the middle of a
        collective; then it is the death that is told.
        """
        tasks = [
            asyncio.ensure_future(worker.call(method, *args, deadline_s=deadline_s, **kwargs))
            for worker in self.workers
        ]
        try:
            return list(await asyncio.gather(*tasks))
        except RlpostError:
            raise
        except Exception as error:
            if (death := await death_among(tasks)) is not None:
                raise death from error
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()


async def death_among(calls: Sequence[asyncio.Task[Any]]) -> WorkerDiedError | None:
    """The first of these calls to end by its worker's death, within DEATH_NOTICE_S."""
    end = time.monotonic() + DEATH_NOTICE_S
    while True:
        for call in calls:
            if call.done() and isinstance(error := call.exception(), WorkerDiedError):
                return error
        pending, left = [call for call in calls if not call.done()], end - time.monotonic()
        if not pending or left <= 0:
            return None
        await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)


async def gather(coroutines: Any) -> list[Any]:
    """Like asyncio.gather, but a failure cancels the others and waits until they are gone."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
