"""PPO with a critic [arXiv:1707.06347]: generalised advantage estimation, clipped surrogates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from rlpost import functional as F
from rlpost.algorithms.base import OutcomeInputs, TokenInputs, ValueLossInputs
from rlpost.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig
from rlpost.lazy import LazyModule
from rlpost.metrics import Metric, mean

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class PpoConfig(PolicyGradientConfig):
    """`value_clip` null: the plain squared error. In the first `num_critic_only_steps` batches the
    actor is not trained."""

    gamma: Annotated[float, Field(gt=0, le=1)]
    lam: Annotated[float, Field(ge=0, le=1)]
    whiten_advantages: bool
    value_clip: PositiveFloat | None
    num_critic_only_steps: NonNegativeInt


class Ppo(PolicyGradient):
    """r_t = -kl_coef kl_t (placed in the reward), plus R_i at the last loss token; A = GAE(r, V).

    Environment tokens are no steps of the decision process: they are skipped, not given reward 0.
    After the last loss token the value is 0, also of an answer that was cut off.
    """

    Config = PpoConfig
    config: PpoConfig

    @property
    def passes(self) -> tuple[str, ...]:
        return (*super().passes, "values")

    @property
    def critic_passes(self) -> tuple[str, ...]:
        """What the returns are made of: without KL in the reward, values alone."""
        in_reward = self.config.kl_coef > 0 and self.config.kl_placement == "reward"
        return self.passes if in_reward else ("values",)

    @property
    def num_critic_only_steps(self) -> int:
        return self.config.num_critic_only_steps

    def outcome(self, inputs: OutcomeInputs) -> torch.Tensor:
        """[N] the reward itself; NaN where missing."""
        return inputs.rewards_N

    def token_advantages(self, inputs: TokenInputs) -> torch.Tensor:
        """[M] GAE, whitened over the batch's loss tokens of all ranks by `whiten_advantages`."""
        advantages_M, keep_M = self._gae(inputs)
        if self.config.whiten_advantages:
            advantages_M = F.whiten(advantages_M, keep_M, inputs.reduce_sum)
        return torch.where(keep_M, advantages_M, 0.0).to(inputs.old_logprobs_M.dtype)

    def returns(self, inputs: TokenInputs) -> torch.Tensor:
        """[M] what the values are regressed on: G = A + V_old, before any whitening."""
        advantages_M, keep_M = self._gae(inputs)
        returns_M = advantages_M + values_of(inputs).double()
        return torch.where(keep_M, returns_M, 0.0).to(values_of(inputs).dtype)

    def _gae(self, inputs: TokenInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 advantages, and which tokens belong to a sample with a reward."""
        missing_S = torch.isnan(inputs.outcome_S)
        outcome_S = torch.where(missing_S, 0.0, inputs.outcome_S.double())
        rewards_M = F.at_last_token(outcome_S, inputs.lengths_S) - self.reward_penalty(inputs)
        advantages_M = F.gae(
            rewards_M,
            values_of(inputs).double(),
            inputs.lengths_S,
            self.config.gamma,
            self.config.lam,
        )
        return advantages_M, ~missing_S.repeat_interleave(inputs.lengths_S)

    def value_loss(self, inputs: ValueLossInputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """L = sum_t weight_t 0.5 max((V - G)^2, (clip(V, V_old +- c) - G)^2)."""
        loss_M, clipped_M = F.clipped_value_loss(
            inputs.values_M, inputs.old_values_M, inputs.returns_M, self.config.value_clip
        )
        loss = (loss_M * inputs.weights_M).sum()
        # One transfer from the device for all numbers.
        parts = [loss, inputs.old_values_M.sum(), inputs.returns_M.sum(), clipped_M.sum()]
        numbers = torch.stack([part.detach().double() for part in parts]).tolist()
        count = len(inputs.values_M)
        return loss, {
            "critic/loss": Metric("sum", numbers[0]),
            "critic/value/mean": mean(numbers[1], count),
            "critic/return/mean": mean(numbers[2], count),
            "critic/clip_fraction": mean(numbers[3], count),
        }


def values_of(inputs: TokenInputs) -> torch.Tensor:
    if inputs.values_M is None:
        raise ValueError("ppo needs values; run the values pass of a critic")
    return inputs.values_M
