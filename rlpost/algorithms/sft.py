"""Supervised fine-tuning: weighted negative log-likelihood of the given tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from rlpost import functional as F
from rlpost.algorithms.base import LossInputs, OutcomeInputs, TokenInputs
from rlpost.algorithms.policy_gradient import check_norm_length
from rlpost.lazy import LazyModule
from rlpost.metrics import Metric

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class SftConfig:
    loss_aggregation: F.Aggregation
    norm_length: PositiveInt | None
    num_minibatches: PositiveInt

    def __post_init__(self) -> None:
        check_norm_length(self.loss_aggregation, self.norm_length)


class Sft:
    """L = -sum_t weight_t l_t. Needs no passes and looks at no rewards."""

    Config = SftConfig
    passes: tuple[str, ...] = ()
    num_ppo_epochs = 1
    dynamic_sampling = False

    def __init__(self, config: SftConfig) -> None:
        self.config = config
        self.num_minibatches = config.num_minibatches

    def outcome(self, inputs: OutcomeInputs) -> torch.Tensor:
        """[N] ones: every sample is trained, rewarded or not."""
        return torch.ones_like(inputs.rewards_N)

    def token_advantages(self, inputs: TokenInputs) -> torch.Tensor:
        """[M] ones, in the dtype of the outcome."""
        return inputs.outcome_S.repeat_interleave(inputs.lengths_S)

    def aggregation_weights(
        self, lengths_S: torch.Tensor, total_tokens: int, total_sequences: int
    ) -> torch.Tensor:
        return F.aggregation_weights(
            lengths_S,
            total_tokens,
            total_sequences,
            self.config.loss_aggregation,
            self.config.norm_length,
        )

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Perplexity is exp of the mean over tokens, whatever the aggregation."""
        loss = -(inputs.weights_M * inputs.logprobs_M).sum()
        total, nll = torch.stack([loss.detach(), -inputs.logprobs_M.detach().sum()]).tolist()
        return loss, {
            "train/loss": Metric("step_mean", total),
            "train/perplexity": Metric("exp_mean", nll, len(inputs.logprobs_M)),
        }
