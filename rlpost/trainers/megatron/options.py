"""Optimizer and learning-rate options, and the learning rate itself. Pure; needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW [arXiv:1711.05101]; Megatron's names. `clip_grad` 0 switches clipping off."""

    lr: PositiveFloat
    weight_decay: NonNegativeFloat
    adam_beta1: Fraction
    adam_beta2: Fraction
    adam_eps: PositiveFloat
    clip_grad: NonNegativeFloat


@dataclass(frozen=True)
class LrScheduleConfig:
    """Linear warm-up, then constant, or a decay to `min_lr` reached at step `decay_steps`."""

    kind: Literal["constant", "linear", "cosine"]
    warmup_steps: NonNegativeInt
    decay_steps: NonNegativeInt
    min_lr: NonNegativeFloat

    def __post_init__(self) -> None:
        if self.kind == "constant" and (self.decay_steps or self.min_lr):
            raise ValueError(
                f"decay_steps ({self.decay_steps}) and min_lr ({self.min_lr:g}) have no effect "
                "with kind constant; set both to 0, or kind to linear or cosine"
            )
        if self.kind != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps ({self.decay_steps}) must be greater than warmup_steps "
                f"({self.warmup_steps}) with kind {self.kind}; it counts from the first step"
            )


def learning_rate(schedule: LrScheduleConfig, peak: float, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Warm-up step s has peak * (s + 1) / warmup_steps, so that no step is lost on a rate of 0.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    span = schedule.decay_steps - schedule.warmup_steps
    progress = min((step - schedule.warmup_steps) / span, 1.0)
    if schedule.kind == "cosine":
        progress = 0.5 * (1.0 - math.cos(math.pi * progress))
    return peak + (schedule.min_lr - peak) * progress
