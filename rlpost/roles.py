"""Which trainer roles a run has. Pure: follows from the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from rlpost.config import RoleConfig, RunConfig, Section, build


@dataclass(frozen=True)
class ServedConfig:
    """A model that is served, never trained, by engines of its own."""

    model: Section
    engine: Section


def needs_reference(config: RunConfig) -> bool:
    """Whether a frozen copy of the model has to run beside the actor."""
    return "ref_logprobs" in build(config.algorithm).passes


def trainer_roles(config: RunConfig) -> dict[str, RoleConfig]:
    """Role name -> model and ranks, the actor first. A teacher's role is `teacher.<name>`.

    None where answers are only generated.
    """
    if config.debug.only == "rollout":
        return {}
    actor = RoleConfig(config.model, config.trainer)
    roles = {"actor": actor}
    if needs_reference(config):
        roles["reference"] = actor
    if config.critic is not None:
        roles["critic"] = config.critic
    if config.distillation is None or build(config.distillation).in_actor:
        return roles
    return roles | teacher_roles(config)


def teacher_roles(config: RunConfig) -> dict[str, RoleConfig]:
    """All teachers, also one that lives in the actor's ranks."""
    return {f"teacher.{name}": role for name, role in config.teachers.items()}


def served_prm(config: RunConfig) -> ServedConfig | None:
    """The process reward model or judge with engines of its own; None if no such is asked."""
    if config.prm is None or getattr(config.prm.config, "engine", None) is None:
        return None
    if config.debug.only == "train":
        return None
    return ServedConfig(config.prm.config.model, config.prm.config.engine)


def engine_roles(config: RunConfig) -> dict[str, Section]:
    """Role name -> engine section, the policy's first. None where saved samples are trained on."""
    if config.debug.only == "train":
        return {}
    roles = {} if config.engine is None else {"engine": config.engine}
    served = served_prm(config)
    return roles if served is None else roles | {"prm": served.engine}
