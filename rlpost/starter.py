"""Starts the workers of a run: trainer roles, engines and what makes the samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.cluster.workers import Worker, WorkerGroup, gather
from rlpost.config import RoleConfig, RunConfig, build
from rlpost.distillation.base import Distillation
from rlpost.distillation.context import TeacherContext
from rlpost.loops.trainers import TRAINED, Role
from rlpost.loops.turns import MOVE_DEADLINE_S
from rlpost.plan import RunPlan
from rlpost.plan.placement import placements
from rlpost.roles import ServedConfig, engine_roles, served_prm, teacher_roles, trainer_roles
from rlpost.rollout.saved import SavedSamples
from rlpost.rollout.worker import RolloutWorker
from rlpost.trainers.base import RankSpec


@dataclass
class Starter:
    """Starts the workers of one run. Each start has a deadline."""

    config: RunConfig
    plan: RunPlan
    run_dir: Path
    model_paths: dict[str, Path]
    cluster: Any

    @property
    def start_deadline_s(self) -> float:
        """Of one process, until it holds its object."""
        return float(self.config.cluster.config.start_deadline_s)

    def spawn(self, role: str) -> list[Worker]:
        return [
            self.cluster.spawn(role=role, rank=rank, placement=placement)
            for rank, placement in enumerate(placements(self.config)[role])
        ]

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
        rendezvous = await workers[0].rendezvous(self.start_deadline_s)
        specs = [
            RankSpec(role, rank, trainer.world_size, rendezvous) for rank in range(len(workers))
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

    def distillation(self) -> Distillation | None:
        section = self.config.distillation
        return None if section is None else build(section)

    def teacher_context(self) -> TeacherContext | None:
        distillation = self.distillation()
        return None if distillation is None else distillation.context(self.config.teachers)


def shares_devices(config: RunConfig) -> bool:
    """Whether engines and trainers take turns; loops that overlap them have no such key."""
    return config.debug.only is None and bool(getattr(config.loop.config, "colocate", False))
