"""Divergence over the K likeliest ids, of the student, of the teacher, or of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt

from rlpost.config import build
from rlpost.distillation.base import (
    NO_ID,
    DistillationConfig,
    Divergent,
    check_beta,
)
from rlpost.distillation.divergence import Kind, Tail, support_divergence

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TopKConfig(DistillationConfig):
    """`k` ids of `subset` each; `beta` is jsd's alone; `tail`: what lies outside of the ids."""

    k: PositiveInt
    subset: Literal["student", "teacher", "union"]
    divergence: Kind
    beta: Annotated[float, Field(gt=0, lt=1)] | None
    tail: Tail

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.divergence, self.beta)

    def conflicts(self, run: Any) -> Iterator[str]:
        yield from super().conflicts(run)
        known = None if run.debug.small_models else build(run.model).settings()
        size = None if known is None else known.get("vocab_size")  # not every family has one
        if size is not None and self.k > size:
            yield (
                f"distillation.k ({self.k}) is more than the {size} tokens of the model's "
                "vocabulary; lower it, or choose distillation=full"
            )


class TopK(Divergent):
    """The ids are chosen once and travel with the batch to the teacher and to the loss."""

    Config = TopKConfig

    def __init__(self, config: TopKConfig) -> None:
        super().__init__(config)
        self.asks_student = 0 if config.subset == "teacher" else config.k
        self.asks_teacher = 0 if config.subset == "student" else config.k
        self.columns = ("teacher_logprobs", "teacher_ids", "teacher_top_logprobs")
        if self.asks_student:
            self.columns = ("student_ids", *self.columns)

    def token_loss(
        self, log_p_MK: torch.Tensor, log_q_MK: torch.Tensor, ids_MK: torch.Tensor
    ) -> torch.Tensor:
        """[M] divergence at the teacher's ids; NaN teacher log-probs give NaN."""
        return support_divergence(
            log_p_MK,
            log_q_MK,
            ids_MK != NO_ID,
            kind=self.kind,
            beta=self.beta,
            tail=self.config.tail,
        )
