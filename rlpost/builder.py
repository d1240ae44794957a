"""Puts the driver of a run together, out of workers that it has started."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.cluster.signals import StopRequest
from rlpost.cluster.workers import Worker, gather
from rlpost.config import RunConfig, build
from rlpost.data.base import PromptSource
from rlpost.data.disjoint import shared_prompts
from rlpost.data.ledger import Ledger
from rlpost.errors import StoppedError
from rlpost.loops.driver import STOP_DEADLINE_S, Driver
from rlpost.loops.evaluation import held_out
from rlpost.loops.intake import Intake
from rlpost.loops.memory_report import MemoryReport
from rlpost.loops.passes import plan_passes
from rlpost.loops.profiler import Profiler
from rlpost.loops.records import Records
from rlpost.loops.rollout_only import RolloutOnly
from rlpost.loops.rollouts import Rollouts
from rlpost.loops.schedule import Schedule
from rlpost.loops.train_only import TrainOnly
from rlpost.loops.trainers import Role, Trainers
from rlpost.loops.turns import Turns
from rlpost.plan import RunPlan
from rlpost.plan.arithmetic import own_passes
from rlpost.prm.credit import CreditConfig
from rlpost.roles import engine_roles, served_prm
from rlpost.starter import Starter, shares_devices
from rlpost.tracking.multi import MultiTracker
from rlpost.tracking.recorder import Recorder


@dataclass
class Builder:
    """Puts the driver of one run together, and runs its loop."""

    config: RunConfig
    plan: RunPlan
    run_dir: Path
    starter: Starter
    recorder: Recorder
    tracker: MultiTracker
    stop: StopRequest

    async def run(self) -> None:
        prm_engines = self.starter.spawn("prm") if served_prm(self.config) else []
        with self.recorder.span("start"):
            driver = await self.build_driver(prm_engines)
        async with disposing(driver, prm_engines):
            if self.config.resume_from is not None:
                await driver.resume(Path(self.config.resume_from))
            async with driver.records.keeping_dropped():
                await chosen_loop(self.config).run(driver)
        if driver.leaving:
            saved = driver.last_checkpoint or "nothing new to save"
            raise StoppedError(f"asked to stop at step {driver.step}: {saved}")

    async def build_driver(self, prm_engines: list[Worker]) -> Driver:
        config = self.config
        engines = self.starter.spawn("engine") if "engine" in engine_roles(config) else []
        roles, _, worker, source = await gather(
            [
                self.starter.start_models(engines),
                self.starter.start_prm(prm_engines),
                self.starter.start_rollout(engines, prm_engines),
                asyncio.to_thread(build, config.data, seed=config.seed),
            ]
        )
        ledger = Ledger(source, num_epochs=None, num_prompts=None)
        rollouts = self.rollouts(worker)
        return Driver(
            schedule=self.schedule(),
            trainers=self.trainers(roles),
            engines=engines,
            rollouts=rollouts,
            ledger=ledger,
            intake=self.intake(ledger, rollouts),
            records=Records(
                self.recorder,
                ledger,
                worker,
                deadline_s=self.schedule().step_deadline_s,
                memory=self.memory_report(engines, prm_engines, roles),
            ),
            weight_sync=self.weight_sync(),
            evaluator=await self.evaluator(source),
            checkpointer=build(config.checkpoint, directory=self.run_dir / "checkpoints"),
            recorder=self.recorder,
            tracker_run_ids=self.tracker.run_ids(),
            turns=self.turns(engines, roles),
            stop=self.stop,
            profiler=self.profiler([*engines, *prm_engines], roles),
        )

    def weight_sync(self) -> Any:
        section = self.config.weight_sync
        return None if section is None or self.config.debug.only is not None else build(section)

    def rollouts(self, worker: Worker) -> Rollouts:
        return Rollouts(
            worker,
            group_size=self.config.group_size,
            deadline_s=self.config.rollout.config.generate_deadline_s,
        )

    def intake(self, ledger: Ledger, rollouts: Rollouts) -> Intake:
        return Intake(
            ledger,
            rollouts,
            prompts_per_step=self.plan.prompts_per_step,
            scored=self.config.reward is not None,
            drop_constant=build(self.config.algorithm).dynamic_sampling,
        )

    def profiler(self, engines: list[Worker], roles: Mapping[str, Role]) -> Profiler | None:
        config = self.config.debug.profile
        if config is None:
            return None
        workers = [worker for role in roles.values() for worker in role.group.workers]
        return Profiler(config, [*workers, *engines], self.run_dir, self.tracker.artifact)

    def memory_report(
        self, engines: list[Worker], prm_engines: list[Worker], roles: Mapping[str, Role]
    ) -> MemoryReport:
        workers = {name: role.group.workers for name, role in roles.items()}
        served = {"engine": engines, "prm": prm_engines}
        on_gpu = frozenset(bundle.role for bundle in self.plan.bundles if bundle.gpus)
        return MemoryReport(self.plan.memory.workers, workers | served, on_gpu)

    def trainers(self, roles: dict[str, Role]) -> Trainers:
        config, algorithm = self.config, build(self.config.algorithm)
        return Trainers(
            schedule=self.schedule(),
            passes=plan_passes(self.plan.passes, own_passes(config)),
            critic_passes=plan_passes(algorithm.critic_passes if config.critic else ()),
            roles=roles,
            credit=step_credit(config),
            recorder=self.recorder,
        )

    def turns(self, engines: list[Worker], roles: Mapping[str, Role]) -> Turns | None:
        if not shares_devices(self.config):
            return None
        return Turns(engines, [role.group for role in roles.values()])

    def schedule(self) -> Schedule:
        algorithm = build(self.config.algorithm)
        return Schedule(
            num_steps=self.plan.num_steps,
            steps_per_epoch=self.plan.steps_per_epoch,
            prompts_per_step=self.plan.prompts_per_step,
            num_minibatches=self.plan.num_minibatches,
            num_ppo_epochs=algorithm.num_ppo_epochs,
            num_critic_only_steps=algorithm.num_critic_only_steps if self.config.critic else 0,
            trains_policy=getattr(algorithm, "trains_policy", True),
            step_deadline_s=self.config.trainer.config.step_deadline_s,
        )

    async def evaluator(self, trained_on: PromptSource) -> Any:
        """Held-out prompts that are also trained on are counted, not refused."""
        section = self.config.eval
        if section is None or self.config.debug.only is not None:
            return None
        source = held_out(section.config)
        shared = await asyncio.to_thread(shared_prompts, trained_on, source)
        self.recorder.add({f"eval/{source.name}/trained_on": float(len(shared))})
        return build(
            section,
            source=source,
            max_response_tokens=self.config.rollout.config.max_response_tokens,
        )


def chosen_loop(config: RunConfig) -> Any:
    """The strategy of the run; debugging one half of a step takes its place."""
    if config.debug.only == "rollout":
        return RolloutOnly(max_draw_factor=config.loop.config.max_draw_factor)
    if config.debug.only == "train":
        return TrainOnly()
    return build(config.loop)


def step_credit(config: RunConfig) -> CreditConfig | None:
    """How step scores become advantages; None where they don't."""
    credit: CreditConfig | None = None if config.prm is None else config.prm.config.credit
    return None if credit is None or credit.mode == "aggregate" else credit


@contextlib.asynccontextmanager
async def disposing(driver: Driver, prm_engines: list[Worker]) -> AsyncIterator[Driver]:
    """Ends pending work and stops engines and the reward pool, whatever happened."""
    try:
        yield driver
    finally:
        await driver.dispose()
        stops = [engine.call("shutdown", deadline_s=STOP_DEADLINE_S) for engine in prm_engines]
        await asyncio.gather(*stops, return_exceptions=True)
