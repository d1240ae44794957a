"""RLOO [arXiv:2402.14740]: each rollout's baseline is the mean of the others in its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost import functional as F
from rlpost.algorithms.base import OutcomeInputs
from rlpost.algorithms.group_relative import GroupRelative, GroupRelativeConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RlooConfig(GroupRelativeConfig):
    """The shared keys and no more."""


class Rloo(GroupRelative):
    """A = R_i - sum_{j != i} R_j / (G-1)."""

    Config = RlooConfig

    def outcome(self, inputs: OutcomeInputs) -> torch.Tensor:
        """[N] leave-one-out advantage; NaN where the reward is missing."""
        return F.leave_one_out(inputs.rewards_N, inputs.group_ids, self.config.singleton)
