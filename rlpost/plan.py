"""The numbers that follow from a configuration: what a run will do, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from rlpost.config import RunConfig, build
from rlpost.data.base import PromptSource
from rlpost.errors import ConfigError, DataError
from rlpost.roles import engine_roles, trainer_roles
from rlpost.validation import Section
from rlpost.wording import join


@dataclass(frozen=True)
class RoleShare:
    """Workers of one role and what each of them takes."""

    role: str
    num_workers: int
    num_cpus: float
    num_gpus: float
    cores: tuple[int, ...]  # pinned core numbers; empty: any

    def __str__(self) -> str:
        cores = f", on cores {', '.join(map(str, self.cores))}" if self.cores else ""
        return f"{self.num_workers} x ({self.num_cpus:g} CPU, {self.num_gpus:g} GPU){cores}"


@dataclass(frozen=True)
class RunPlan:
    """Batch arithmetic, steps, passes, placement and deadlines. Pure; nothing is started.

    128 samples in groups of 8, 2 minibatches, 2 data-parallel ranks: 16 prompts per step,
    64 samples per optimizer step, 32 of them on each rank.
    """

    num_prompts: int  # per epoch
    prompts_per_step: int
    group_size: int
    train_batch_size: int
    num_minibatches: int
    data_parallel_size: int
    num_steps: int
    steps_per_epoch: int
    passes: tuple[str, ...]
    roles: tuple[RoleShare, ...]
    deadlines_s: dict[str, float]

    @property
    def samples_per_minibatch(self) -> int:
        return self.train_batch_size // self.num_minibatches

    @property
    def samples_per_rank(self) -> int:
        """Samples of one optimizer step on one data-parallel rank."""
        return self.samples_per_minibatch // self.data_parallel_size

    @classmethod
    def of(cls, config: RunConfig) -> RunPlan:
        """Reads the data set for its size. Raises ConfigError if it holds less than one batch."""
        num_prompts = prompts_per_epoch(config)
        prompts_per_step = config.train_batch_size // config.group_size
        return cls(
            num_prompts=num_prompts,
            prompts_per_step=prompts_per_step,
            group_size=config.group_size,
            train_batch_size=config.train_batch_size,
            num_minibatches=config.algorithm.config.num_minibatches,
            data_parallel_size=config.trainer.config.data_parallel_size,
            num_steps=num_steps(config, num_prompts, prompts_per_step),
            steps_per_epoch=max(1, num_prompts // prompts_per_step),
            passes=passes(config),
            roles=tuple(roles(config)),
            deadlines_s=dict(deadlines(config)),
        )

    def print(self, console: Console | None = None) -> None:
        console = console or Console()
        for item in tables(self):
            console.print(item)


def prompts_per_epoch(config: RunConfig) -> int:
    """Opens the data set, so that a wrong path or task is found before anything starts."""
    try:
        source = build(config.data, seed=config.seed)
        check_routes(config, source)
        return len(source)
    except DataError as error:
        raise ConfigError([f"data: {error}"]) from error


def check_routes(config: RunConfig, source: PromptSource) -> None:
    """Reads all prompts once if they choose their teacher. Raises DataError for one without."""
    section = config.distillation
    if section is None or section.config.route_by is None:
        return
    context = build(section).context(config.teachers)
    for index in range(len(source)):
        context.teacher_of(source.get(0, index))


def num_steps(config: RunConfig, num_prompts: int, prompts_per_step: int) -> int:
    """Training batches of the run: as given, or as many whole ones as the epochs hold."""
    if config.num_epochs is None:
        assert config.num_steps is not None
        return config.num_steps
    steps = config.num_epochs * num_prompts // prompts_per_step
    if steps == 0:
        raise ConfigError(
            [
                f"num_epochs ({config.num_epochs}) x {num_prompts} prompts of the data set are "
                f"less than one batch of {prompts_per_step} prompts; lower train_batch_size "
                f"({config.train_batch_size}) or raise num_epochs"
            ]
        )
    return steps


def passes(config: RunConfig) -> tuple[str, ...]:
    """What is computed on a batch before training; algorithm and distillation say it."""
    names = tuple(build(config.algorithm).passes)
    if config.distillation is not None:
        names += tuple(build(config.distillation).passes)
    return tuple(dict.fromkeys(names))


def roles(config: RunConfig) -> Iterator[RoleShare]:
    """Worker groups of the run."""
    pinned = getattr(config.cluster.config, "cores", {})
    for role, parts in trainer_roles(config).items():
        trainer = parts.trainer.config
        yield RoleShare(
            role,
            trainer.world_size,
            trainer.num_cpus_per_rank,
            trainer.num_gpus_per_rank,
            tuple(pinned.get(role, ())),
        )
    for role, section in engine_roles(config).items():
        engine = section.config
        yield RoleShare(
            role,
            engine.num_engines,
            engine.num_cpus_per_engine,
            engine.num_gpus_per_engine,
            tuple(pinned.get(role, ())),
        )


def deadlines(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every key that limits a wait, with its full path, in seconds."""
    value = value.config if isinstance(value, Section) else value
    if not is_dataclass(value):
        return
    for field in fields(value):
        item, where = getattr(value, field.name), join(path, field.name)
        if field.name.endswith(("deadline_s", "timeout_s")) and isinstance(item, float):
            yield where, item
        yield from deadlines(item, where)


def tables(plan: RunPlan) -> Iterator[Table]:
    """The plan as small tables, for people."""
    batch = {
        "prompts per step": plan.prompts_per_step,
        "rollouts per prompt": plan.group_size,
        "samples per batch": plan.train_batch_size,
        "optimizer steps per visit of a batch": plan.num_minibatches,
        "samples per optimizer step": plan.samples_per_minibatch,
        "data-parallel ranks": plan.data_parallel_size,
        "samples per rank and optimizer step": plan.samples_per_rank,
    }
    steps = {
        "prompts per epoch": plan.num_prompts,
        "steps per epoch": plan.steps_per_epoch,
        "steps": plan.num_steps,
    }
    order = enumerate((*plan.passes, "train"), start=1)
    yield table("batch", batch.items())
    yield table("steps", steps.items())
    yield table("passes, in order", order)
    yield table("placement", [(share.role, share) for share in plan.roles])
    yield table("deadlines", [(key, f"{value:g} s") for key, value in plan.deadlines_s.items()])


def table(title: str, rows: Iterable[tuple[Any, Any]]) -> Table:
    made = Table(title=title, title_justify="left", show_header=False, min_width=len(title) + 4)
    for name, value in rows:
        made.add_row(str(name), str(value))
    return made
