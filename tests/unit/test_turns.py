"""Engines and trainers on the same devices: who leaves before who comes in, through the driver."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.cluster.workers import WorkerGroup
from rlpost.loops.driver import Driver
from rlpost.loops.trainers import Role, Trainers
from rlpost.loops.turns import Turns
from rlpost.validation import Section
from rlpost.weight_sync.transaction import WeightSync, WeightSyncConfig

MOVES = ("offload", "wake weights", "wake kv_cache")
TRAIN = ["engine.sleep", "actor.onload"]
ADMIT = ["actor.offload", "engine.wake weights"]
PUSH = [
    *("actor.export_weights", *ADMIT, "engine.pause", "engine.load_weights"),
    *("engine.wake kv_cache", "engine.commit", "engine.resume"),
]


class Recorded:
    """A worker that answers everything and writes down what it was asked."""

    def __init__(self, role: str, calls: list[str]) -> None:
        self.role, self.calls = role, calls

    async def call(self, method: str, *args: Any, deadline_s: float) -> list[Any]:
        part = f" {args[0]}" if method == "wake" else ""
        self.calls.append(f"{self.role}.{method}{part}")
        return []


class Transport:
    """Stages one chunk of nothing."""

    def __init__(self, config: None) -> None: ...

    async def prepare(self, trainer: Any, *, dtype: str, deadline_s: float) -> list[Any]:
        await trainer.call("export_weights", dtype, deadline_s=deadline_s)
        return [SimpleNamespace(specs=(), fingerprints={})]

    async def transfer(self, chunks: list[Any], engine: Any, *, deadline_s: float) -> None:
        await engine.call("load_weights", chunks, deadline_s=deadline_s)

    async def release(self, chunks: list[Any]) -> None: ...


def sync() -> WeightSync:
    transport = Section("", Transport, None)
    return WeightSync(WeightSyncConfig(transport, "float32", "keep", "none", 0.5, 1, 1, 1, 1, 1))


class Always:
    """Saves and evaluations that are due at once, as calls of one role."""

    def __init__(self, worker: Recorded) -> None:
        self.worker = worker

    def due(self, step: int, **_: bool) -> bool:
        return True

    async def save(self, step: int, **_: Any) -> None:
        await self.worker.call("save", deadline_s=1)

    async def load(self, folder: Any, **_: Any) -> dict[str, Any]:
        await self.worker.call("load", deadline_s=1)
        return {"step": 0, "policy_version": 0, "ledger": {}}

    async def run(self, rollouts: Any, version: int) -> dict[str, float]:
        await self.worker.call("generate", deadline_s=1)
        return {}


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def driver(calls: list[str]) -> Any:
    actor, engine = Recorded("actor", calls), Recorded("engine", calls)
    group: Any = WorkerGroup("actor", [actor])  # type: ignore[list-item]
    ledger = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    schedule: Any = SimpleNamespace(
        trains_actor=lambda step: True,
        makes_version=lambda step: True,
        is_epoch_end=lambda step: False,
        is_last=lambda step: False,
    )
    recorder: Any = SimpleNamespace(
        span=lambda name: contextlib.nullcontext(), add=lambda metrics: None
    )
    trainers = Trainers(schedule, (), (), {"actor": Role(group, 1)}, None, recorder)
    fields = dict.fromkeys(name for name in Driver.__dataclass_fields__ if name[0] != "_")
    return Driver(
        **fields
        | {
            "schedule": schedule,
            "trainers": trainers,
            "engines": [engine],
            "ledger": ledger,
            "weight_sync": sync(),
            "evaluator": Always(engine),
            "checkpointer": Always(actor),
            "recorder": recorder,
            "turns": Turns([engine], [group]),
            "step": 1,
            "policy_version": 0,
        }
    )


async def test_weights_leave_before_the_trainer_and_kv_caches_come_last(
    driver: Driver, calls: list[str]
) -> None:
    await driver.publish()
    assert calls == [*TRAIN, *PUSH]


async def test_a_step_moves_each_side_once(driver: Driver, calls: list[str]) -> None:
    await driver.eval_if_due()
    await driver.run_passes(SimpleNamespace(step=0, done=()))  # type: ignore[arg-type]
    await driver.publish_update()
    await driver.eval_if_due()
    assert calls == ["engine.generate", *TRAIN, *PUSH, "engine.generate"]


async def test_a_save_reads_the_trainer_on_its_devices(driver: Driver, calls: list[str]) -> None:
    await driver.save_if_due()
    await driver.eval_if_due()
    assert calls == [*TRAIN, "actor.save", *ADMIT, "engine.wake kv_cache", "engine.generate"]


async def test_a_resume_loads_into_the_trainer_on_its_devices(
    driver: Driver, calls: list[str], tmp_path: Any
) -> None:
    await driver.resume(tmp_path)
    await driver.publish()
    assert calls == [*TRAIN, "actor.load", *PUSH]


async def test_without_turns_nothing_moves(driver: Driver, calls: list[str]) -> None:
    driver.turns = None
    await driver.publish()
    assert calls == [call for call in PUSH if call.split(".")[1] not in MOVES]
