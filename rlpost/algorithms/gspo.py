"""GSPO [arXiv:2507.18071]: GRPO with one importance ratio per sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlpost.algorithms.grpo import Grpo, GrpoConfig


@dataclass(frozen=True)
class GspoConfig(GrpoConfig):
    policy_loss: Literal["gspo"]


class Gspo(Grpo):
    """GRPO's advantage; s_i = exp(mean_t(l - old)) in place of the token ratio."""

    Config = GspoConfig
