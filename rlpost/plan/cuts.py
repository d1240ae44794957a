"""Parallel sizes that a model does not bear, found before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlpost.config import RunConfig
from rlpost.models.cuts import uneven_cuts
from rlpost.models.shape import ModelShape
from rlpost.roles import engine_roles, trainer_roles


def cut_problems(config: RunConfig, known: Mapping[str, ModelShape | None]) -> Iterator[str]:
    """Nothing for a model whose sizes are not known until it is there."""
    for role, parts in trainer_roles(config).items():
        shape, trainer = known.get(role), parts.trainer.config
        if shape is None or role == "reference":  # which has the actor's section
            continue
        split_asked_for = any("pipeline" in option for option in getattr(trainer, "megatron", {}))
        yield from (
            f"{role}: {line}"
            for line in uneven_cuts(
                num_heads=shape.num_heads,
                intermediate_size=shape.intermediate_size,
                num_layers=shape.num_layers,
                tp=getattr(trainer, "tensor_model_parallel_size", 1),
                pp=1 if split_asked_for else getattr(trainer, "pipeline_model_parallel_size", 1),
            )
        )
    for role, section in engine_roles(config).items():
        shape = known.get(role)
        if shape is not None:
            yield from (
                f"{role}: {line}"
                for line in uneven_cuts(
                    num_heads=shape.num_heads,
                    intermediate_size=shape.intermediate_size,
                    num_layers=1,
                    tp=getattr(section.config, "tensor_parallel_size", 1),
                    pp=1,
                )
            )
