"""Batches, steps, passes and staleness, from the configuration and the size of the data set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from rlpost.checkpoint import saved_step
from rlpost.config import RunConfig, build
from rlpost.data.base import PromptSource
from rlpost.errors import CheckpointError, ConfigError, DataError
from rlpost.loops.evaluation import held_out
from rlpost.loops.passes import Pass, plan_passes, teacher_passes
from rlpost.roles import engine_roles, trainer_roles
from rlpost.validation import Section
from rlpost.wording import join


@dataclass(frozen=True)
class Split:
    """How many samples each data-parallel rank of a role gets: of a batch, of an optimizer step."""

    data_parallel_size: int
    of_batch: int
    of_optimizer_step: int | None  # None: the role is not trained


def data_set(config: RunConfig) -> tuple[str, int]:
    """Name and prompts. Opens it, so that a wrong path or task is found before anything starts."""
    try:
        source = build(config.data, seed=config.seed)
        check_routes(config, source)
        return str(source.name), len(source)
    except DataError as error:
        raise ConfigError([f"data: {error}"]) from error


def check_eval_data(config: RunConfig) -> None:
    """Opens the held-out set for the same reason, unless its Config says how many prompts it will
    have: such a set is generated, which takes its time. Raises ConfigError."""
    if config.eval is None:
        return
    data = config.eval.config.data
    num_prompts = getattr(data.config, "size", None)
    try:
        if num_prompts is None:
            num_prompts = len(held_out(config.eval.config))
    except DataError as error:
        raise ConfigError([f"eval.data: {error}"]) from error
    config.eval.config.check_size(num_prompts)


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


def resume_problems(config: RunConfig, num_steps: int) -> Iterator[str]:
    """A run that goes on from its last step would end at once, as if it had done something."""
    if config.resume_from is None:
        return
    try:
        done = saved_step(Path(config.resume_from))
    except CheckpointError:
        return  # told when it is opened
    if done >= num_steps:
        yield (
            f"resume_from: the checkpoint is of step {done}, and the run ends after {num_steps}, "
            "so nothing is left to do; raise num_steps (or num_epochs)"
        )


def profile_problems(config: RunConfig, num_steps: int) -> Iterator[str]:
    """A step that never comes, or has been, would leave no trace."""
    profile = config.debug.profile
    if profile is None:
        return
    if profile.last_step > num_steps:
        yield (
            f"debug.profile: the last step it records is {profile.last_step} (first_step "
            f"{profile.first_step}, num_steps {profile.num_steps}), but the run ends after "
            f"{num_steps}; raise num_steps or lower debug.profile.first_step"
        )
    try:
        done = 0 if config.resume_from is None else saved_step(Path(config.resume_from))
    except CheckpointError as error:
        yield f"resume_from: {error}"
        return
    if profile.first_step <= done:
        yield (
            f"debug.profile: the first step it records is {profile.first_step}, but the run goes "
            f"on after step {done} of resume_from; set debug.profile.first_step={done + 1} or more"
        )


def pass_names(config: RunConfig) -> tuple[str, ...]:
    """What is computed on a batch before training; algorithm and distillation say it."""
    names = tuple(build(config.algorithm).passes)
    if config.distillation is not None:
        names += tuple(build(config.distillation).passes)
    return tuple(dict.fromkeys(names))


def passes(config: RunConfig) -> tuple[Pass, ...]:
    """The same with the role that computes each, in the order in which they can start."""
    return plan_passes(pass_names(config), own_passes(config))


def own_passes(config: RunConfig) -> tuple[Pass, ...]:
    """Those of teachers with ranks of their own."""
    if config.distillation is None:
        return ()
    distillation = build(config.distillation)
    if distillation.in_actor:
        return ()
    return teacher_passes(config.teachers, distillation.teacher_needs)


def trained_roles(config: RunConfig) -> tuple[str, ...]:
    """Those with an optimizer; none where answers are only generated."""
    return tuple(role for role in trainer_roles(config) if role in ("actor", "critic"))


def splits(config: RunConfig) -> dict[str, Split]:
    """Role -> its share of the samples."""
    per_step = config.train_batch_size // config.algorithm.config.num_minibatches
    found = {}
    for role, parts in trainer_roles(config).items():
        ranks = parts.trainer.config.data_parallel_size
        trained = role in trained_roles(config)
        # Passes split unevenly where they have to.
        found[role] = Split(
            ranks, -(-config.train_batch_size // ranks), per_step // ranks if trained else None
        )
    return found


def staleness(config: RunConfig) -> str:
    """How far the policy that generated a sample may be behind the one that trains on it."""
    if "engine" not in engine_roles(config):
        return "nothing is generated"
    if not getattr(config.algorithm.target, "trains_policy", True):
        return "0 versions, as no policy is trained"
    bound = getattr(config.loop.config, "max_staleness", None)
    if bound is None:
        return "the loop does not say"
    if bound == 0:
        return "0 versions"
    interval = config.loop.config.update_weights_interval
    steps = "" if interval == 1 else f", each of {interval} steps"
    return f"up to {bound} version{'s'[: bound != 1]}{steps}"


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
