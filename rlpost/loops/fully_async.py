"""The fully asynchronous loop: prompts stream, groups queue, the trainer takes what is ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from rlpost.loops import report
from rlpost.loops.driver import Driver
from rlpost.loops.stream import RolloutStream, Source, StreamSettings


@dataclass(frozen=True)
class FullyAsyncLoopConfig:
    """`max_staleness` counts published versions; `on_stale` says what happens at the bound."""

    max_staleness: NonNegativeInt
    on_stale: Literal["drop", "wait"]
    update_weights_interval: PositiveInt
    max_draw_factor: PositiveFloat


class FullyAsyncLoop:
    """Strategy `fully_async`. With `max_staleness: 0` it gives what the sync loop gives.

    Engines never wait for a batch: updates are published in flight, right after the optimizer
    step, and running rollouts go on under the new version.
    """

    Config = FullyAsyncLoopConfig

    def __init__(self, config: FullyAsyncLoopConfig) -> None:
        self.config = config

    async def run(self, driver: Driver) -> None:
        await driver.start()
        stream = self._stream(driver)
        stream.start()
        try:
            while not driver.finished:
                with driver.recorder.span("step"):
                    with driver.recorder.span("wait"):
                        batch = await stream.take(driver.step)
                    staleness = report.staleness_max(batch, driver.policy_version)
                    batch, metrics = await driver.train(await driver.run_passes(batch))
                    await self._publish_if_due(driver)
                    stream.trained(driver.policy_version)
                await driver.finish_step(batch, metrics, staleness=staleness)
        finally:
            await stream.close()
        await driver.wait_for_samples()

    async def _publish_if_due(self, driver: Driver) -> None:
        if driver.step % self.config.update_weights_interval == 0 or driver.finished:
            await driver.publish_update()

    def _stream(self, driver: Driver) -> RolloutStream:
        settings = StreamSettings(
            num_steps=driver.schedule.num_steps,
            first_step=driver.step,
            prompts_per_step=driver.schedule.prompts_per_step,
            update_weights_interval=self.config.update_weights_interval,
            max_staleness=self.config.max_staleness,
            on_stale=self.config.on_stale,
            max_draw_factor=self.config.max_draw_factor,
        )
        source = Source(
            ledger=driver.ledger,
            begin=lambda prompts, version: driver.rollouts.begin(prompts, policy_version=version),
            finish=driver.rollouts.finish,
            settle=driver.intake.settle,
        )
        return RolloutStream(settings, source, driver.policy_version)
