"""DAPO [arXiv:2503.14476]: GRPO with a higher upper clip, token mean and dynamic sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlpost.algorithms.grpo import Grpo, GrpoConfig


@dataclass(frozen=True)
class DapoConfig(GrpoConfig):
    policy_loss: Literal["ppo_clip"]

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.clip_low is not None and self.clip_high is not None, "ppo_clip has both"
        if self.clip_high <= self.clip_low:
            raise ValueError(
                f"clip_high ({self.clip_high}) must be above clip_low ({self.clip_low}) for dapo "
                "(clip-higher); raise it, or use algorithm: grpo"
            )


class Dapo(Grpo):
    """GRPO's advantage and loss under DAPO's constraints."""

    Config = DapoConfig
