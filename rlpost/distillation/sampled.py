"""The teacher's log-prob of each sampled token, as an advantage: policy gradient of reverse KL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import PositiveFloat

from rlpost.distillation.base import Distillation, DistillationConfig
from rlpost.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class SampledConfig(DistillationConfig):
    """`clip` bounds the gain of a token, in nats; null: no bound."""

    clip: PositiveFloat | None


class Sampled(Distillation):
    """A_it = policy_coef * A_it + coef * clip(tau_it - old_it); a missing tau adds nothing."""

    Config = SampledConfig
    columns = ("old_logprobs", "teacher_logprobs")

    def advantages(
        self, advantages_M: torch.Tensor, old_M: torch.Tensor, teacher_M: torch.Tensor | None
    ) -> torch.Tensor:
        assert teacher_M is not None, "the teacher_logprobs pass ran"
        gain_M = torch.nan_to_num(teacher_M - old_M, nan=0.0)
        if self.config.clip is not None:
            gain_M = gain_M.clamp(-self.config.clip, self.config.clip)
        return super().advantages(advantages_M, old_M, None) + float(self.config.coef) * gain_M
