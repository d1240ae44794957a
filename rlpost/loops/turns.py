"""Who holds the devices, where engines and trainers take turns on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rlpost.cluster.workers import gather

if TYPE_CHECKING:
    from rlpost.cluster.workers import Worker, WorkerGroup

MOVE_DEADLINE_S = 300.0  # one move of a model out of device memory or back


class Turns:
    """Moves one side out before the other comes in. The engines begin, trainers being out.

    Worked example, one step: engines generate; `to_trainers`: engines sleep, trainers come in;
    they train and stage their weights; `admit_weights`: trainers leave, the engines' weights come
    in and are replaced; `admit_kv_cache`: engines can generate.
    """

    def __init__(self, engines: Sequence[Worker], trainers: Sequence[WorkerGroup]) -> None:
        self._engines = engines
        self._trainers = trainers
        self._holder: Literal["trainers", "engine weights", "engines"] = "engines"

    async def to_trainers(self) -> None:
        if self._holder == "trainers":
            return
        await gather(engine.call("sleep", deadline_s=MOVE_DEADLINE_S) for engine in self._engines)
        await gather(role.call("onload", deadline_s=MOVE_DEADLINE_S) for role in self._trainers)
        self._holder = "trainers"

    async def to_engines(self) -> None:
        """With the weights they had when they fell asleep."""
        await self.admit_weights()
        await self.admit_kv_cache()

    async def admit_weights(self) -> None:
        if self._holder != "trainers":
            return
        await gather(role.call("offload", deadline_s=MOVE_DEADLINE_S) for role in self._trainers)
        await self._wake("weights")
        self._holder = "engine weights"

    async def admit_kv_cache(self) -> None:
        if self._holder == "engines":
            return
        assert self._holder == "engine weights", "the KV cache comes after the weights"
        await self._wake("kv_cache")
        self._holder = "engines"

    async def _wake(self, part: str) -> None:
        await gather(
            engine.call("wake", part, deadline_s=MOVE_DEADLINE_S) for engine in self._engines
        )
