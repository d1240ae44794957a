"""Exact divergence over the whole vocabulary, with the teacher in the actor's own ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from rlpost.distillation.base import DistillationConfig, Divergent, check_beta
from rlpost.distillation.divergence import Kind

SHARED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "make_vocab_size_divisible_by",
    "megatron",
)


@dataclass(frozen=True)
class FullConfig(DistillationConfig):
    """`beta` is jsd's alone."""

    divergence: Kind
    beta: Annotated[float, Field(gt=0, lt=1)] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.divergence, self.beta)
        if self.route_by is not None:
            raise ValueError(
                f"route_by ({self.route_by!r}): the actor's ranks hold one teacher with full; set "
                "route_by: null, or choose distillation=topk"
            )

    def conflicts(self, run: Any) -> Iterator[str]:
        yield from super().conflicts(run)
        ours = run.trainer.config
        for name, teacher in run.teachers.items():
            theirs = teacher.trainer.config
            for key in SHARED:
                here, there = getattr(ours, key), getattr(theirs, key)
                if here != there:
                    yield (
                        f"teachers.{name}.trainer.{key} ({there}): with distillation=full the "
                        f"teacher lives in the actor's ranks, where it is {here}; set it to that"
                    )


class Full(Divergent):
    """Nothing is transported: hidden states of student and teacher meet in the same rank."""

    Config = FullConfig
    in_actor = True
