"""REINFORCE++ [arXiv:2501.03262]: token returns, whitened over the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from rlpost import functional as F
from rlpost.algorithms.base import OutcomeInputs, TokenInputs
from rlpost.algorithms.group_relative import lone_rewards
from rlpost.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig, require
from rlpost.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class ReinforcePpConfig(PolicyGradientConfig):
    gamma: Annotated[float, Field(gt=0, le=1)]
    group_baseline: bool
    singleton: F.Singleton | None

    def __post_init__(self) -> None:
        super().__post_init__()
        because = f"group_baseline: {str(self.group_baseline).lower()}"
        require("singleton", self.singleton, used=self.group_baseline, because=because)

    def conflicts(self, run: Any) -> Iterator[str]:
        """`run` is the whole RunConfig."""
        yield from lone_rewards(run)


class ReinforcePp(PolicyGradient):
    """r_it = -kl_coef * kl_it, plus R_i at the last loss token; A = whiten(return to go of r)."""

    Config = ReinforcePpConfig
    config: ReinforcePpConfig

    def outcome(self, inputs: OutcomeInputs) -> torch.Tensor:
        """[N] the reward, less the group's mean with `group_baseline`; NaN where missing."""
        if self.config.singleton is None:
            return inputs.rewards_N
        return F.group_centered(inputs.rewards_N, inputs.group_ids, self.config.singleton)

    def token_advantages(self, inputs: TokenInputs) -> torch.Tensor:
        """[M] whitened over the loss tokens of all ranks whose sample has a reward; else 0."""
        missing_S = torch.isnan(inputs.outcome_S)
        outcome_S = torch.where(missing_S, 0.0, inputs.outcome_S.double())
        rewards_M = F.at_last_token(outcome_S, inputs.lengths_S) - self.reward_penalty(inputs)
        returns_M = F.return_to_go(rewards_M, inputs.lengths_S, self.config.gamma)
        keep_M = ~missing_S.repeat_interleave(inputs.lengths_S)
        whitened_M = F.whiten(returns_M, keep_M, inputs.reduce_sum)
        return whitened_M.to(inputs.old_logprobs_M.dtype)
