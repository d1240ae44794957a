"""The order of events in the three loops, on a driver that only notes what it is asked."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.data.ledger import Ledger
from rlpost.loops.fully_async import FullyAsyncLoop, FullyAsyncLoopConfig
from rlpost.loops.one_step_async import AsyncLoop, AsyncLoopConfig
from rlpost.loops.sync import SyncLoop, SyncLoopConfig
from rlpost.types import GroupHandle, Prompt

LOOPS: dict[str, Any] = {
    "sync": lambda: SyncLoop(SyncLoopConfig(colocate=False, max_draw_factor=8.0)),
    "async": lambda: AsyncLoop(AsyncLoopConfig(1, 1, max_draw_factor=8.0)),
    "fully_async": lambda: FullyAsyncLoop(FullyAsyncLoopConfig(1, "drop", 1, 8.0)),
}


def group(key: str, version: int) -> GroupHandle:
    return GroupHandle(
        prompt_key=key, sample_ids=(f"{key}#0",), block=None, rewards=(1.0,), accuracies=(1.0,),
        lengths=(3,), loss_tokens=(2,), finish_reasons=("stop",), oldest_version=version,
        verdict_counts={}, generate_s=0.0, reward_s=0.0,
    )  # fmt: skip


class Prompts:
    name = "fake"

    def __len__(self) -> int:
        return 100

    def get(self, epoch: int, index: int) -> Prompt:
        return Prompt(f"p{index}", epoch, index, text="x")


class Driver:
    """Batches of one group. `slow` batches are there only once `released` says so."""

    def __init__(self, num_steps: int = 3, step: int = 0) -> None:
        self.events: list[str] = []
        self.released = asyncio.Event()
        self.slow: set[int] = set()
        self.step, self.policy_version = step, step
        self.schedule = SimpleNamespace(
            num_steps=num_steps, prompts_per_step=1, num_critic_only_steps=0
        )
        self.recorder = SimpleNamespace(span=lambda name: nullcontext())
        self.ledger = Ledger(Prompts(), num_epochs=None, num_prompts=None)
        self.rollouts = self
        self.intake = SimpleNamespace(settle=lambda group: "")
        self._versions: dict[str, int] = {}

    @property
    def finished(self) -> bool:
        return self.step >= self.schedule.num_steps

    async def start(self) -> None:
        self.events.append("start")

    async def take_batch(self, step: int, *, max_draw_factor: float) -> Any:
        await self.answer(step)
        return SimpleNamespace(step=step, groups=(group(f"p{step}", self.policy_version),))

    async def answer(self, step: int) -> None:
        if step in self.slow:
            await self.released.wait()
        self.events.append(f"batch {step}")

    async def begin(self, prompts: list[Prompt], *, policy_version: int) -> list[str]:
        self._versions |= {prompt.key: policy_version for prompt in prompts}
        return [prompt.key for prompt in prompts]

    async def finish(self, key: str) -> GroupHandle:
        await self.answer(int(key.partition("@")[0].removeprefix("p")))
        return group(key, self._versions[key])

    async def run_early_passes(self, batch: Any) -> Any:
        return batch

    async def run_passes(self, batch: Any) -> Any:
        self.events.append(f"passes {batch.step}")
        return batch

    async def train(self, batch: Any) -> tuple[Any, dict[str, float]]:
        self.events.append(f"train {batch.step}")
        await asyncio.sleep(0.001)
        self.step += 1
        return batch, {}

    async def publish_update(self) -> None:
        self.policy_version += 1
        self.events.append(f"publish {self.policy_version}")

    async def finish_step(self, batch: Any, metrics: Any, *, staleness: float) -> None:
        self.events.append(f"finish {batch.step}")

    async def wait_for_samples(self) -> None:
        self.events.append("end")


async def run(name: str, driver: Any) -> list[str]:
    await asyncio.wait_for(LOOPS[name]().run(driver), 5)
    return [event for event in driver.events if not event.startswith("batch")]


@pytest.mark.parametrize("name", LOOPS)
async def test_a_step_is_passes_training_publishing_and_what_is_due(name: str) -> None:
    steps = [
        event
        for step in range(3)
        for event in (f"passes {step}", f"train {step}", f"publish {step + 1}", f"finish {step}")
    ]
    assert await run(name, Driver()) == ["start", *steps, "end"]


@pytest.mark.parametrize("name", ["async", "fully_async"])
async def test_weights_are_published_although_the_next_batch_is_not_there(name: str) -> None:
    """Else engines would go on with old weights until the slowest answer has come."""
    driver = Driver()
    driver.slow = {1}
    running = asyncio.create_task(run(name, driver))
    while "finish 0" not in driver.events:
        await asyncio.sleep(0)
        assert not running.done()
    assert "publish 1" in driver.events and "batch 1" not in driver.events
    driver.released.set()
    await running


@pytest.mark.parametrize("name", LOOPS)
async def test_a_run_that_is_finished_generates_and_trains_nothing(name: str) -> None:
    driver = Driver(num_steps=3, step=3)
    await run(name, driver)
    assert driver.events == ["start", "end"]


async def test_with_lookahead_the_next_batch_is_made_while_this_one_trains() -> None:
    driver = Driver()
    await run("async", driver)
    assert driver.events.index("batch 1") < driver.events.index("publish 1")
