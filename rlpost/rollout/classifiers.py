"""Spreads responses over the engines of a token classifier."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.cluster.workers import Worker
from rlpost.errors import EngineError, WorkerDiedError
from rlpost.rollout.engine_pool import RETRIED, none_alive
from rlpost.types import Array


@dataclass(eq=False)
class Replica:
    """One engine; `load` counts the tokens it was given and has not answered."""

    worker: Worker
    place: int
    load: int = 0
    death: str = ""  # how its process died; an engine with a death is given no more work


class ClassifierPool:
    """Fewest outstanding tokens first, ties by rank. An engine whose process died is fenced."""

    def __init__(self, engines: Sequence[Worker], *, deadline_s: float, max_attempts: int) -> None:
        self._replicas = [Replica(worker, place) for place, worker in enumerate(engines)]
        self._deadline_s = deadline_s
        self._max_attempts = max_attempts

    async def classify(self, token_ids: Sequence[int]) -> Array:
        """[L, labels] raw outputs.

        Raises EngineError when every attempt has failed, WorkerDiedError when all engines are dead.
        """
        tried: set[int] = set()
        for attempt in itertools.count(1):
            replica = self._pick(tried)
            try:
                return await self._ask(replica, token_ids)
            except RETRIED as error:
                tried.add(replica.place)
                if isinstance(error, WorkerDiedError):
                    replica.death = str(error)
                if attempt == self._max_attempts:
                    raise EngineError(
                        f"{attempt} attempts failed; the last one: {error}"
                    ) from error
        raise AssertionError("count() does not end")

    async def _ask(self, replica: Replica, token_ids: Sequence[int]) -> Array:
        replica.load += len(token_ids)
        try:
            outputs: Array = await replica.worker.call(
                "classify", list(token_ids), deadline_s=self._deadline_s
            )
        finally:
            replica.load -= len(token_ids)
        if len(outputs) != len(token_ids):
            raise EngineError(f"{len(outputs)} outputs came for {len(token_ids)} tokens")
        return outputs

    def _pick(self, tried: set[int]) -> Replica:
        usable = [replica for replica in self._replicas if not replica.death]
        if not usable:
            raise none_alive([replica.death for replica in self._replicas])
        fresh = [replica for replica in usable if replica.place not in tried]
        return min(fresh or usable, key=lambda replica: (replica.load, replica.place))
