"""The second half of each step: passes and optimizer steps on the samples that a run has saved."""

from __future__ import annotations

from rlpost.loops import report
from rlpost.loops.batches import Batch
from rlpost.loops.driver import Driver


class TrainOnly:
    """`debug.only: train`. Step k trains on the groups of step k; nothing is saved but samples."""

    async def run(self, driver: Driver) -> None:
        await driver.profile()
        while not driver.finished:
            with driver.recorder.span("step"):
                batch = await self._saved_batch(driver)
                staleness = report.staleness_max(batch, driver.policy_version)
                batch, metrics = await driver.train(await driver.run_passes(batch))
                await driver.publish_update()
            driver.recorder.add(report.rollout_metrics(batch))
            driver.records.training(
                metrics, staleness=staleness, policy_version=driver.policy_version
            )
            await driver.records.samples(batch)
            driver.recorder.flush(driver.step)
            await driver.profile()
            driver.leaving = driver.stop.came and not driver.finished
        await driver.wait_for_samples()

    async def _saved_batch(self, driver: Driver) -> Batch:
        groups = await driver.rollouts.worker.call(
            "groups", driver.step + 1, deadline_s=driver.schedule.step_deadline_s
        )
        return Batch.of(driver.step, groups, [], generate_s=0.0, reward_s=0.0)
