"""GRPO [arXiv:2402.03300]: rewards normalised within the group, clipped surrogate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlpost import functional as F
from rlpost.algorithms.base import OutcomeInputs
from rlpost.algorithms.group_relative import GroupRelative, GroupRelativeConfig
from rlpost.algorithms.policy_gradient import require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GrpoConfig(GroupRelativeConfig):
    normalize_std: bool
    std: F.Std | None

    def __post_init__(self) -> None:
        super().__post_init__()
        because = f"normalize_std: {str(self.normalize_std).lower()}"
        require("std", self.std, used=self.normalize_std, because=because)


class Grpo(GroupRelative):
    """A = (R_i - mean_g) / (std_g + eps), or R_i - mean_g without `normalize_std`."""

    Config: ClassVar[type[GrpoConfig]] = GrpoConfig
    config: GrpoConfig

    def outcome(self, inputs: OutcomeInputs) -> torch.Tensor:
        """[N] group-relative advantage; NaN where the reward is missing."""
        rewards_N, ids, config = inputs.rewards_N, inputs.group_ids, self.config
        if config.std is None:
            return F.group_centered(rewards_N, ids, config.singleton)
        return F.group_normalized(rewards_N, ids, config.std, config.singleton)
