"""Spreads responses over the engines of a token classifier."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rlpost.cluster.workers import Worker
from rlpost.errors import EngineError
from rlpost.rollout.replicas import RETRIED, Replica, Replicas
from rlpost.types import Array


class ClassifierPool:
    """Responses go to the replica with the least to do; one whose process died gets no more."""

    def __init__(self, engines: Sequence[Worker], *, deadline_s: float, max_attempts: int) -> None:
        self._replicas = Replicas(engines)
        self._deadline_s = deadline_s
        self._max_attempts = max_attempts

    async def classify(self, token_ids: Sequence[int]) -> Array:
        """[L, labels] raw outputs.

        Raises EngineError when every attempt has failed, WorkerDiedError when all engines are dead.
        """
        tried: set[int] = set()
        for attempt in itertools.count(1):
            replica = self._replicas.pick(tried)
            try:
                return await self._ask(replica, token_ids)
            except RETRIED as error:
                tried.add(replica.place)
                replica.fence_if_dead(error)
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
