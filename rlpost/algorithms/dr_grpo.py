"""Dr.GRPO [arXiv:2503.20783]: GRPO without the two biases, by std and by response length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost import functional as F
from rlpost.algorithms.base import OutcomeInputs
from rlpost.algorithms.group_relative import GroupRelative, GroupRelativeConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DrGrpoConfig(GroupRelativeConfig):
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_aggregation == "sequence_mean_token_mean":
            raise ValueError(
                "loss_aggregation (sequence_mean_token_mean) brings back the length bias that "
                "dr_grpo removes; use sequence_mean_token_sum_norm, or algorithm: grpo"
            )


class DrGrpo(GroupRelative):
    """A = R_i - mean_g."""

    Config = DrGrpoConfig

    def outcome(self, inputs: OutcomeInputs) -> torch.Tensor:
        """[N] centred reward; NaN where the reward is missing."""
        return F.group_centered(inputs.rewards_N, inputs.group_ids, self.config.singleton)
