"""What the algorithms share that compare a reward with the rewards of its own group."""

from __future__ import annotations

from dataclasses import dataclass

from rlpost import functional as F
from rlpost.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig


@dataclass(frozen=True)
class GroupRelativeConfig(PolicyGradientConfig):
    singleton: F.Singleton
    dynamic_sampling: bool


class GroupRelative(PolicyGradient):
    """A group whose rewards are all equal teaches nothing, so the loop may draw another."""

    config: GroupRelativeConfig

    @property
    def dynamic_sampling(self) -> bool:
        return self.config.dynamic_sampling
