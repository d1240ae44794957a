"""Actor and critic in the driver: both train at once, the critic alone in the first steps."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.loops.batches import Batch
from rlpost.loops.driver import Driver
from rlpost.loops.passes import plan_passes
from rlpost.loops.schedule import Schedule
from rlpost.loops.trainers import Role, Trainers
from rlpost.metrics import mean
from rlpost.trainers.base import TrainResult
from rlpost.types import GroupHandle, PassResult, StoredBlock


class Group:
    """A role's ranks; counts the calls that are in flight at the same time."""

    in_flight = 0
    most = 0

    def __init__(self, role: str, size: int) -> None:
        self.role, self.size, self.called = role, size, []

    async def call(self, method: str, view: Any, *args: Any, deadline_s: float) -> list[Any]:
        self.called.append((method, *args))
        shares = list(view.minibatches)
        assert all(len(minibatch) == self.size for minibatch in shares)
        Group.in_flight += 1
        Group.most = max(Group.most, Group.in_flight)
        await asyncio.sleep(0.001)
        Group.in_flight -= 1
        return [self._result(method, rank, shares) for rank in range(self.size)]

    def _result(self, method: str, rank: int, shares: Any) -> Any:
        names = tuple(name for minibatch in shares for name in minibatch[rank])
        block = StoredBlock(f"{self.role}.{method}", names)
        if method != "train":
            return PassResult(block=block, metrics={}, seconds=0.1)
        return TrainResult({f"{self.role}/loss": mean(1.0, 1)}, 0, 0.1, block)


class Recorder:
    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        yield

    def add_time(self, name: str, seconds: float) -> None:
        self.times[name] = seconds


class Records:
    async def samples(self, batch: Batch) -> None: ...

    async def measure_memory(self) -> None: ...


class Checkpointer:
    async def save(self, step: int, **given: Any) -> Path:
        self.given = given
        return Path("saved")

    def due(self, step: int, **_: Any) -> bool:
        return True

    async def load(self, folder: Path, *, roles: dict[str, Any]) -> dict[str, Any]:
        self.loaded = sorted(roles)
        return {"step": 3, "policy_version": 1, "ledger": {}}


class Ledger:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.fixture
def driver() -> Driver:
    Group.most = 0
    sizes = {"actor": 2, "reference": 1, "critic": 1}
    recorder = Recorder()
    schedule = Schedule(
        num_steps=4,
        steps_per_epoch=4,
        prompts_per_step=2,
        num_minibatches=1,
        num_ppo_epochs=2,
        num_critic_only_steps=2,
        trains_policy=True,
        step_deadline_s=1.0,
    )
    trainers = Trainers(
        schedule=schedule,
        passes=plan_passes(("old_logprobs", "ref_logprobs", "values")),
        critic_passes=plan_passes(("values",)),
        roles={name: Role(Group(name, size), size) for name, size in sizes.items()},
        credit=None,
        recorder=recorder,
    )
    return Driver(
        schedule=schedule,
        trainers=trainers,
        engines=[],
        rollouts=None,
        ledger=Ledger(),
        intake=None,
        records=Records(),
        weight_sync=None,
        evaluator=None,
        checkpointer=Checkpointer(),
        recorder=recorder,
        tracker_run_ids={},
    )


def batch_of(step: int) -> Batch:
    groups = [
        GroupHandle(
            prompt_key=key, sample_ids=(f"{key}#0",), block=f"block {key}", rewards=(1.0,),
            accuracies=(1.0,), lengths=(3,), loss_tokens=(2,), finish_reasons=("stop",),
            oldest_version=0, verdict_counts={}, generate_s=0.0, reward_s=0.0,
        )
        for key in "ab"
    ]  # fmt: skip
    return Batch.of(step, groups, [], generate_s=0.0, reward_s=0.0)


async def step(driver: Driver) -> tuple[Batch, dict[str, float]]:
    batch, metrics = await driver.train(await driver.run_passes(batch_of(driver.step)))
    await driver.publish_update()
    return batch, metrics


def calls(driver: Driver, role: str) -> list[Any]:
    return driver.trainers.roles[role].group.called


async def test_at_first_only_the_critic_is_asked_and_no_version_is_made(driver: Driver) -> None:
    for _ in range(2):
        _, metrics = await step(driver)
    assert calls(driver, "actor") == calls(driver, "reference") == []
    assert calls(driver, "critic") == [("compute_values", "values"), ("train",)] * 2
    assert driver.policy_version == 0
    assert metrics == {"critic/loss": 1.0, "critic/skipped_steps": 0.0}


async def test_then_actor_and_critic_train_at_the_same_time(driver: Driver) -> None:
    driver.step = 2
    batch, metrics = await step(driver)
    assert Group.most == 3  # the passes of all roles at once, too
    assert calls(driver, "actor") == [("compute_logprobs", "old_logprobs"), ("train",)]
    assert driver.policy_version == 1
    assert set(metrics) >= {"actor/loss", "critic/loss", "train/skipped_steps"}
    assert {"critic.train", "actor.train"} <= {block.ref for block in batch.blocks}
    assert set(driver.recorder.times) >= {"values", "train_actor", "train_critic"}


async def test_a_run_that_trains_no_policy_makes_no_version(driver: Driver) -> None:
    """Its answers never grow old: the model that gives them is not the one that is trained."""
    driver.schedule = dataclasses.replace(driver.schedule, trains_policy=False)
    driver.step = 2
    await step(driver)
    assert ("train",) in calls(driver, "actor")
    assert driver.policy_version == 0


async def test_a_checkpoint_holds_both_and_a_resume_restores_both(driver: Driver) -> None:
    await driver.save_if_due()
    assert sorted(driver.checkpointer.given["roles"]) == ["actor", "critic"]
    assert driver.checkpointer.given["exports"] == {"hf": "actor", "critic_hf": "critic"}
    await driver.resume(Path("saved"))
    assert driver.checkpointer.loaded == ["actor", "critic"]


async def test_a_resumed_run_gives_the_engines_all_weights_under_its_old_version(
    driver: Driver,
) -> None:
    """Else the first answers would come from the model that the engines have loaded."""
    pushed = []

    async def push(version: int, *_: Any, full: bool, **__: Any) -> dict[str, float]:
        pushed.append((version, full))
        return {}

    driver.weight_sync = SimpleNamespace(push=push)
    driver.recorder.add = lambda metrics: None
    await driver.resume(Path("saved"))
    await driver.start()
    assert pushed == [(1, True)] and driver.step == 3


async def test_only_frozen_roles_start_early_and_no_pass_runs_twice(driver: Driver) -> None:
    driver.step = 2
    ahead = await driver.run_early_passes(batch_of(2))
    assert calls(driver, "actor") == calls(driver, "critic") == []
    assert calls(driver, "reference") == [("compute_logprobs", "ref_logprobs")]
    whole = await driver.run_passes(ahead)
    assert calls(driver, "reference") == [("compute_logprobs", "ref_logprobs")]
    assert {item.name for item in whole.done} == {"old_logprobs", "ref_logprobs", "values"}


async def test_asked_to_stop_it_saves_after_the_step_at_hand_and_leaves(driver: Driver) -> None:
    done: list[str] = []
    driver.record = lambda *_, **__: done.append("record")
    driver.recorder.flush = lambda step: done.append(f"flush {step}")
    driver.checkpointer.due = lambda *_, **__: False
    batch, metrics = await step(driver)
    driver.stop = Stop()
    await driver.finish_step(batch, metrics, staleness=0.0)
    assert driver.last_checkpoint == Path("saved")
    assert driver.finished and driver.leaving and done == ["record", "flush 1"]


async def test_asked_to_stop_before_its_first_step_it_leaves_at_once(driver: Driver) -> None:
    driver.stop = Stop()
    await driver.start()
    assert driver.finished and driver.last_checkpoint is None


class Stop:
    came = True
