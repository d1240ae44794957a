"""The first half of each step: batches are generated and scored, nothing is trained."""

from __future__ import annotations

from rlpost.loops.driver import Driver


class RolloutOnly:
    """`debug.only: rollout`. Engines keep the weights that the model came with."""

    def __init__(self, *, max_draw_factor: float) -> None:
        self._max_draw_factor = max_draw_factor

    async def run(self, driver: Driver) -> None:
        await driver.profile()
        while not driver.finished:
            with driver.recorder.span("step"):
                batch = await driver.take_batch(driver.step, max_draw_factor=self._max_draw_factor)
            driver.records.rollouts(batch)
            await driver.records.samples(batch, reason="admitted")
            driver.step += 1
            driver.recorder.flush(driver.step)
            await driver.profile()
            driver.leaving = driver.stop.came and not driver.finished
        await driver.wait_for_samples()
