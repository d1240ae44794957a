"""The asynchronous loop: batch k+1 is generated while batch k is trained."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from rlpost.loops import report
from rlpost.loops.batches import Batch
from rlpost.loops.driver import Driver


@dataclass(frozen=True)
class AsyncLoopConfig:
    """`update_weights_interval` counts steps; `max_draw_factor` as in the sync loop."""

    lookahead: NonNegativeInt
    update_weights_interval: PositiveInt
    max_draw_factor: PositiveFloat

    def __post_init__(self) -> None:
        if self.lookahead > 1:
            raise ValueError(
                f"loop.lookahead ({self.lookahead}) is 0 or 1 batches; for more use "
                "loop=fully_async with loop.max_staleness"
            )

    @property
    def max_staleness(self) -> int:
        """Versions: a batch is generated while the one before it trains."""
        return self.lookahead


class AsyncLoop:
    """Strategy `async`. Without lookahead it is the sync loop, step by step.

    One task besides the driver's: it makes the next batch. It is awaited by the next step, or
    cancelled when the run ends; its error ends the run.
    """

    Config = AsyncLoopConfig

    def __init__(self, config: AsyncLoopConfig) -> None:
        self.config = config
        self._ahead: asyncio.Task[Batch] | None = None

    async def run(self, driver: Driver) -> None:
        await driver.start()
        async with self._generating():
            while not driver.finished:
                with driver.recorder.span("step"):
                    batch = await self._next_batch(driver)
                    staleness = report.staleness_max(batch, driver.policy_version)
                    batch, metrics = await driver.train(await driver.run_passes(batch))
                    await self._publish_if_due(driver)
                await driver.finish_step(batch, metrics, staleness=staleness)
        await driver.wait_for_samples()

    async def _next_batch(self, driver: Driver) -> Batch:
        """The batch of this step; with lookahead the next one begins to be generated."""
        with driver.recorder.span("wait"):
            batch = await (self._ahead or self._take(driver, driver.step))
        more = driver.step + 1 < driver.schedule.num_steps
        self._ahead = None
        if self.config.lookahead and more:
            self._ahead = asyncio.create_task(self._take(driver, driver.step + 1))
        return batch

    async def _take(self, driver: Driver, step: int) -> Batch:
        """Generates a batch; ahead of its step, frozen roles score it too."""
        batch = await driver.take_batch(step, max_draw_factor=self.config.max_draw_factor)
        return await driver.run_early_passes(batch)

    async def _publish_if_due(self, driver: Driver) -> None:
        if driver.step % self.config.update_weights_interval == 0 or driver.finished:
            await driver.publish_update()

    @contextlib.asynccontextmanager
    async def _generating(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if self._ahead is not None:
                self._ahead.cancel()
                await asyncio.gather(self._ahead, return_exceptions=True)
