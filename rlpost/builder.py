"""Starts the workers of a run and puts its driver together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.cluster.signals import StopRequest
from rlpost.cluster.workers import Worker, WorkerGroup, gather
from rlpost.config import RoleConfig, RunConfig, Section, build
from rlpost.data.disjoint import shared_prompts
from rlpost.data.ledger import Ledger
from rlpost.distillation.base import Distillation
from rlpost.distillation.context import TeacherContext
from rlpost.distillation.vocabulary import check_vocabularies
from rlpost.errors import StoppedError
from rlpost.loops.driver import Driver
from rlpost.loops.memory_report import MemoryReport
from rlpost.loops.passes import plan_passes
from rlpost.loops.profiler import Profiler
from rlpost.loops.rollout_only import RolloutOnly
from rlpost.loops.rollouts import Rollouts
from rlpost.loops.schedule import Schedule
from rlpost.loops.train_only import TrainOnly
from rlpost.loops.trainers import TRAINED, Role, Trainers
from rlpost.loops.turns import MOVE_DEADLINE_S, Turns
from rlpost.models.small import prepare_small
from rlpost.plan import RunPlan
from rlpost.plan.arithmetic import own_passes
from rlpost.plan.placement import placements
from rlpost.prm.credit import CreditConfig
from rlpost.roles import ServedConfig, engine_roles, served_prm, teacher_roles, trainer_roles
from rlpost.rollout.saved import SavedSamples
from rlpost.rollout.worker import RolloutWorker
from rlpost.tracking.multi import MultiTracker
from rlpost.tracking.recorder import Recorder
from rlpost.trainers.base import RankSpec


def prepare_models(config: RunConfig) -> dict[str, Path]:
    """Role -> folder of its model, downloaded, converted or trained if it is not there yet."""
    prepared = small_or_whole(config)
    folders: list[tuple[Section, Path]] = []
    paths: dict[str, Path] = {}
    # The actor's is read by engines and for its tokenizer, also where nothing is trained.
    roles = {"actor": RoleConfig(config.model, config.trainer)} | trainer_roles(config)
    teachers = {} if config.debug.only == "rollout" else teacher_roles(config)
    for role, parts in (roles | teachers).items():
        known = [folder for model, folder in folders if model == parts.model]
        paths[role] = known[0] if known else prepared(parts.model)
        folders.append((parts.model, paths[role]))
    if served := served_prm(config):
        known = [folder for model, folder in folders if model == served.model]
        paths["prm"] = known[0] if known else prepared(served.model)
    return paths


def small_or_whole(config: RunConfig) -> Callable[[Section], Path]:
    """What makes a model's folder: the model itself, or a small random one of its kind."""
    cache_dir = Path(config.output_dir) / "models"
    if config.debug.small_models:
        return lambda model: prepare_small(build(model), cache_dir)
    return lambda model: build(model).prepare(cache_dir)


def check_teachers(config: RunConfig, paths: Mapping[str, Path]) -> None:
    """What only the models' folders tell. Raises ConfigError."""
    if config.distillation is not None and config.debug.only != "rollout":
        k = getattr(config.distillation.config, "k", None)
        check_vocabularies(paths["actor"], {name: paths[name] for name in teacher_roles(config)}, k)


@dataclass
class Builder:
    """Starts the workers of one run and puts the driver together."""

    config: RunConfig
    plan: RunPlan
    run_dir: Path
    model_paths: dict[str, Path]
    cluster: Any
    recorder: Recorder
    tracker: MultiTracker
    stop: StopRequest

    @property
    def start_deadline_s(self) -> float:
        """Of one process, until it holds its object."""
        return float(self.config.cluster.config.start_deadline_s)

    async def run(self) -> float | None:
        prm_engines = self.spawn("prm") if served_prm(self.config) else []
        with self.recorder.span("start"):
            driver = await self.build_driver(prm_engines)
        async with disposing(driver, prm_engines):
            if self.config.resume_from is not None:
                await driver.resume(Path(self.config.resume_from))
            await chosen_loop(self.config).run(driver)
        if driver.leaving:
            saved = driver.last_checkpoint or "nothing new to save"
            raise StoppedError(f"asked to stop at step {driver.step}: {saved}")
        return None

    async def build_driver(self, prm_engines: list[Worker]) -> Driver:
        config = self.config
        engines = self.spawn("engine") if "engine" in engine_roles(config) else []
        roles, _, worker, source = await gather(
            [
                self.start_models(engines),
                self.start_prm(prm_engines),
                self.start_rollout(engines, prm_engines),
                asyncio.to_thread(build, config.data, seed=config.seed),
            ]
        )
        rollout, algorithm = config.rollout.config, build(config.algorithm)
        whole = config.debug.only is None
        evaluator = self.evaluator(config.eval if whole else None)
        if evaluator is not None:
            shared = await asyncio.to_thread(shared_prompts, source, evaluator.source)
            self.recorder.add({f"eval/{evaluator.source.name}/trained_on": float(len(shared))})
        return Driver(
            schedule=self.schedule(),
            trainers=self.trainers(roles),
            engines=engines,
            rollouts=Rollouts(
                worker, group_size=config.group_size, deadline_s=rollout.generate_deadline_s
            ),
            ledger=Ledger(source, num_epochs=None, num_prompts=None),
            weight_sync=build(config.weight_sync) if config.weight_sync and whole else None,
            evaluator=evaluator,
            checkpointer=build(config.checkpoint, directory=self.run_dir / "checkpoints"),
            recorder=self.recorder,
            tracker_run_ids=self.tracker.run_ids(),
            scored=config.reward is not None,
            drop_constant=algorithm.dynamic_sampling,
            turns=self.turns(engines, roles),
            memory=self.memory_report(engines, prm_engines, roles),
            stop=self.stop,
            profiler=self.profiler([*engines, *prm_engines], roles),
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

    def distillation(self) -> Distillation | None:
        section = self.config.distillation
        return None if section is None else build(section)

    def teacher_context(self) -> TeacherContext | None:
        distillation = self.distillation()
        return None if distillation is None else distillation.context(self.config.teachers)

    def schedule(self) -> Schedule:
        algorithm = build(self.config.algorithm)
        return Schedule(
            num_steps=self.plan.num_steps,
            steps_per_epoch=self.plan.steps_per_epoch,
            prompts_per_step=self.plan.prompts_per_step,
            num_minibatches=self.plan.num_minibatches,
            num_ppo_epochs=algorithm.num_ppo_epochs,
            num_critic_only_steps=algorithm.num_critic_only_steps if self.config.critic else 0,
            step_deadline_s=self.config.trainer.config.step_deadline_s,
        )

    def evaluator(self, section: Section | None) -> Any:
        if section is None:
            return None
        return build(
            section,
            source=build(section.config.data, seed=self.config.seed),
            max_response_tokens=self.config.rollout.config.max_response_tokens,
        )

    async def start_models(self, engines: list[Worker]) -> dict[str, Role]:
        """Trainer roles and engines; where they share devices, engines find the trainers out."""
        if not shares_devices(self.config):
            roles, _ = await gather([self.start_roles(), self.start_engines(engines)])
            started: dict[str, Role] = roles
            return started
        started = await self.start_roles()
        await gather(
            role.group.call("offload", deadline_s=MOVE_DEADLINE_S) for role in started.values()
        )
        await self.start_engines(engines)
        return started

    async def start_roles(self) -> dict[str, Role]:
        roles = trainer_roles(self.config)
        started = await gather(self.start_role(role, parts) for role, parts in roles.items())
        return dict(zip(roles, started, strict=True))

    async def start_role(self, role: str, parts: RoleConfig) -> Role:
        section, trainer = parts.trainer, parts.trainer.config
        workers = self.spawn(role)
        address, port = await workers[0].rendezvous(self.start_deadline_s)
        specs = [
            RankSpec(role, rank, trainer.world_size, address, port) for rank in range(len(workers))
        ]
        await gather(
            worker.create(
                section.target,
                [trainer],
                self.rank_arguments(spec, parts),
                deadline_s=self.start_deadline_s,
            )
            for worker, spec in zip(workers, specs, strict=True)
        )
        group = WorkerGroup(role, workers)
        await group.call("setup", deadline_s=trainer.setup_deadline_s)
        return Role(group, trainer.data_parallel_size)

    def rank_arguments(self, spec: RankSpec, parts: RoleConfig) -> Mapping[str, Any]:
        arguments = {
            "spec": spec,
            "model_path": str(self.model_paths[spec.role]),
            "dtype": parts.model.config.dtype,
            "algorithm": build(self.config.algorithm) if spec.role in TRAINED else None,
            "seed": self.config.seed,
        }
        if spec.role == "critic" or getattr(parts.trainer.target, "classifies", False):
            return arguments  # neither samples nor scores tokens, so no temperature
        arguments["temperature"] = self.config.rollout.config.temperature
        return arguments | self.distillation_arguments(spec.role)

    def distillation_arguments(self, role: str) -> dict[str, Any]:
        """What the actor and the teachers get beside the other arguments."""
        distillation = self.distillation()
        if distillation is None or role == "reference":
            return {}
        arguments: dict[str, Any] = {"distillation": distillation}
        if role != "actor":
            arguments["temperature"] = distillation.config.teacher_temperature
        elif distillation.in_actor:
            (teacher,) = teacher_roles(self.config)
            arguments["teacher_path"] = str(self.model_paths[teacher])
        return arguments

    async def start_engines(self, engines: list[Worker]) -> None:
        section = engine_roles(self.config).get("engine")
        if section is not None:
            served = ServedConfig(self.config.model, section)
            await gather(self.start_engine(served, engine, "actor") for engine in engines)

    async def start_prm(self, engines: list[Worker]) -> None:
        if served := served_prm(self.config):
            await gather(self.start_engine(served, engine, "prm") for engine in engines)

    async def start_engine(self, served: ServedConfig, engine: Worker, model: str) -> None:
        section, options = served.engine, served.model.config
        arguments = {
            "model_path": str(self.model_paths[model]),
            "dtype": options.dtype,
            "max_model_len": options.max_length,
            "role": engine.role,
            "rank": engine.rank,
            "seed": self.config.seed,
        }
        await engine.create(
            section.target, [section.config], arguments, deadline_s=self.start_deadline_s
        )
        await engine.call("start", deadline_s=section.config.start_deadline_s)

    async def start_rollout(self, engines: list[Worker], prm_engines: list[Worker]) -> Worker:
        (worker,) = self.spawn("rollout")
        if self.config.debug.samples_from is not None:
            await self.start_saved_samples(worker, Path(self.config.debug.samples_from))
            return worker
        arguments = {
            "model_path": str(self.model_paths["actor"]),
            "engines": engines,
            "reward": self.config.reward,
            "group_size": self.config.group_size,
            "seed": self.config.seed,
            "run_dir": self.run_dir,
            "teacher": self.teacher_context(),
            "prm": self.config.prm,
            "prm_engines": prm_engines,
            "prm_model_path": str(self.model_paths["prm"]) if prm_engines else None,
        }
        await worker.create(
            RolloutWorker, [self.config.rollout], arguments, deadline_s=self.start_deadline_s
        )
        await worker.call("start", deadline_s=self.start_deadline_s)
        return worker

    async def start_saved_samples(self, worker: Worker, source: Path) -> None:
        """In place of a rollout worker."""
        arguments = {
            "source": source,
            "model_path": str(self.model_paths["actor"]),
            "prompts_per_step": self.plan.prompts_per_step,
            "group_size": self.config.group_size,
            "teachers": tuple(self.config.teachers) if self.config.distillation else (),
            "run_dir": self.run_dir,
        }
        await worker.create(SavedSamples, [], arguments, deadline_s=self.start_deadline_s)
        await worker.call("start", self.plan.num_steps, deadline_s=self.start_deadline_s)

    def spawn(self, role: str) -> list[Worker]:
        return [
            self.cluster.spawn(role=role, rank=rank, placement=placement)
            for rank, placement in enumerate(placements(self.config)[role])
        ]


def shares_devices(config: RunConfig) -> bool:
    """Whether engines and trainers take turns; loops that overlap them have no such key."""
    return config.debug.only is None and bool(getattr(config.loop.config, "colocate", False))


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
        stops = [engine.call("shutdown", deadline_s=10.0) for engine in prm_engines]
        await asyncio.gather(*stops, return_exceptions=True)
