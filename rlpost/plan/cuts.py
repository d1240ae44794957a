"""Parallel sizes that a model does not bear, found before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlpost.config import RunConfig
from rlpost.models.cuts import uneven_cuts
from rlpost.models.shape import ModelShape
from rlpost.roles import engine_roles, trainer_roles


def cut_problems(config: RunConfig, known: Mapping[str, ModelShape | None]) -> Iterator[str]:
    """Nothing for a model whose sizes are not known until it is there."""
    for role, cut in cuts(config):
        shape = known.get(role)
        if shape is not None:
            lines = uneven_cuts(
                num_heads=shape.num_heads,
                num_key_value_heads=shape.num_key_value_heads,
                intermediate_size=shape.intermediate_size,
                num_layers=shape.num_layers,
                **cut,
            )
            yield from (f"{role}: {line}" for line in lines)


def cuts(config: RunConfig) -> Iterator[tuple[str, dict[str, int]]]:
    """Role -> the ranks over which its layers (tp) and its stack of layers (pp) are cut."""
    for role, parts in trainer_roles(config).items():
        if role != "reference":  # which has the actor's section
            yield role, trainer_cut(parts.trainer.config)
    for role, section in engine_roles(config).items():
        yield role, {"tp": getattr(section.config, "tensor_parallel_size", 1), "pp": 1}


def trainer_cut(trainer: Any) -> dict[str, int]:
    tp = getattr(trainer, "tensor_model_parallel_size", 1)
    if any("pipeline" in option for option in getattr(trainer, "megatron", {})):
        return {"tp": tp, "pp": 1}  # a split of the user's own, which Megatron checks
    return {"tp": tp, "pp": getattr(trainer, "pipeline_model_parallel_size", 1)}
