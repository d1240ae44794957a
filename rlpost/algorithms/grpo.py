"""GRPO [arXiv:2402.03300]: rewards normalised within the group, clipped surrogate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost import functional as F
from rlpost.algorithms.base import OutcomeInputs
from rlpost.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig, require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GrpoConfig(PolicyGradientConfig):
    normalize_std: bool
    std: F.Std | None
    singleton: F.Singleton
    dynamic_sampling: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        because = f"normalize_std: {str(self.normalize_std).lower()}"
        require("std", self.std, used=self.normalize_std, because=because)


class Grpo(PolicyGradient):
    """A = (R_i - mean_g) / (std_g + eps), or R_i - mean_g without `normalize_std`."""

    Config = GrpoConfig

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self.std, self.singleton = config.std, config.singleton
        self._dynamic_sampling = config.dynamic_sampling

    @property
    def dynamic_sampling(self) -> bool:
        return self._dynamic_sampling

    def outcome(self, inputs: OutcomeInputs) -> torch.Tensor:
        """[N] group-relative advantage; NaN where the reward is missing."""
        if self.std is None:
            return F.group_centered(inputs.rewards_N, inputs.group_ids, self.singleton)
        return F.group_normalized(inputs.rewards_N, inputs.group_ids, self.std, self.singleton)
