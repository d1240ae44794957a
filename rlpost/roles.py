"""Which trainer roles a run has. Pure: follows from the configuration."""

from __future__ import annotations

from rlpost.config import RoleConfig, RunConfig, build


def needs_reference(config: RunConfig) -> bool:
    """Whether a frozen copy of the model has to run beside the actor."""
    return "ref_logprobs" in build(config.algorithm).passes


def trainer_roles(config: RunConfig) -> dict[str, RoleConfig]:
    """Role name -> model and ranks, the actor first. A teacher's role is `teacher.<name>`."""
    actor = RoleConfig(config.model, config.trainer)
    roles = {"actor": actor}
    if needs_reference(config):
        roles["reference"] = actor
    if config.critic is not None:
        roles["critic"] = config.critic
    return roles | {f"teacher.{name}": role for name, role in config.teachers.items()}
