"""CISPO [MiniMax-M1, arXiv:2506.13585]: GRPO with a clipped weight on the log-prob."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlpost.algorithms.grpo import Grpo, GrpoConfig


@dataclass(frozen=True)
class CispoConfig(GrpoConfig):
    policy_loss: Literal["cispo"]


class Cispo(Grpo):
    """GRPO's advantage; -sg(clip(rho)) A l in place of the clipped surrogate."""

    Config = CispoConfig
