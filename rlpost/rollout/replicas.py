"""Replicas of an engine, and which of them gets the next work."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from rlpost.cluster.workers import Worker
from rlpost.errors import DeadlineError, EngineError, WorkerDiedError

# What another engine may do better.
RETRIED = (EngineError, DeadlineError, WorkerDiedError)


@dataclass(eq=False)
class Replica:
    """One engine; `load` counts the tokens it was given and has not answered."""

    worker: Worker
    place: int
    load: int = 0
    death: str = ""  # how its process died; an engine with a death is given no more work

    def fence_if_dead(self, error: Exception) -> bool:
        """Whether its process is known to be dead, from this error or an earlier one."""
        if isinstance(error, WorkerDiedError):
            self.death = str(error)
        return bool(self.death)


class Replicas:
    """Fewest outstanding tokens first, ties by rank: the same calls give the same placement."""

    def __init__(self, engines: Sequence[Worker]) -> None:
        self._all = [Replica(worker, place) for place, worker in enumerate(engines)]

    def pick(self, tried: Container[int]) -> Replica:
        """One that is alive, and not in a place that was `tried` if there is another.

        Raises WorkerDiedError when all are dead: unlike a failed request, which a budget would
        bear for a while, nothing can be answered any more.
        """
        usable = [replica for replica in self._all if not replica.death]
        if not usable:
            deaths = "; ".join(replica.death for replica in self._all)
            raise WorkerDiedError(f"none of {len(self._all)} engines is alive: {deaths}")
        fresh = [replica for replica in usable if replica.place not in tried]
        return min(fresh or usable, key=lambda replica: (replica.load, replica.place))
