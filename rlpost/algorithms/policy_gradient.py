"""What all policy-gradient algorithms share: options, passes, surrogate, KL, correction, weights.

An algorithm on top is its `outcome` (and, for token returns, `token_advantages`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from rlpost import functional as F
from rlpost.algorithms.base import LossInputs, OutcomeInputs, TokenInputs
from rlpost.algorithms.loss_metrics import Terms, loss_metrics, weighted
from rlpost.lazy import LazyModule
from rlpost.metrics import Metric

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

PolicyLoss = Literal["ppo_clip", "gspo", "cispo", "reinforce"]
Correction = Literal["none", "tis", "mask", "sequence_tis", "sequence_mask"]


def require(key: str, value: object, *, used: bool, because: str) -> None:
    """An optional key must be set exactly when something reads it. Raises ValueError."""
    if used and value is None:
        raise ValueError(f"{key} is null but {because} needs it; give {key} a value")
    if not used and value is not None:
        raise ValueError(f"{key} ({value}) has no effect with {because}; set {key}: null")


@dataclass(frozen=True)
class PolicyGradientConfig:
    """Options of the loss, see PolicyGradient.loss. A key is null exactly where the options that
    were chosen do not read it."""

    policy_loss: PolicyLoss
    clip_low: Annotated[float, Field(ge=0, le=1)] | None
    clip_high: PositiveFloat | None
    dual_clip: Annotated[float, Field(gt=1)] | None
    correction: Correction
    correction_min: NonNegativeFloat | None
    correction_max: PositiveFloat | None
    correction_sequence: F.SequenceMean | None
    kl_coef: NonNegativeFloat
    kl_estimator: F.KlEstimator
    kl_placement: Literal["loss", "reward"]
    kl_unbiased: bool
    entropy_coef: NonNegativeFloat
    loss_aggregation: F.Aggregation
    norm_length: PositiveInt | None
    num_minibatches: PositiveInt
    num_ppo_epochs: PositiveInt

    def __post_init__(self) -> None:
        self._check_policy_loss()
        self._check_correction()
        check_norm_length(self.loss_aggregation, self.norm_length)
        if self.kl_unbiased and (self.kl_coef == 0 or self.kl_placement != "loss"):
            raise ValueError(
                f"kl_unbiased (true) has no effect with kl_coef: {self.kl_coef}, kl_placement: "
                f"{self.kl_placement}; set kl_unbiased: false (or kl_placement: loss, kl_coef > 0)"
            )

    def _check_policy_loss(self) -> None:
        because = f"policy_loss: {self.policy_loss}"
        clips = self.policy_loss != "reinforce"
        require("clip_low", self.clip_low, used=clips, because=because)
        require("clip_high", self.clip_high, used=clips, because=because)
        if self.policy_loss not in ("ppo_clip", "gspo"):
            require("dual_clip", self.dual_clip, used=False, because=because)

    def _check_correction(self) -> None:
        because = f"correction: {self.correction}"
        masks, corrects = self.correction.endswith("mask"), self.correction != "none"
        by_sequence = self.correction.startswith("sequence")
        require("correction_min", self.correction_min, used=masks, because=because)
        require("correction_max", self.correction_max, used=corrects, because=because)
        require("correction_sequence", self.correction_sequence, used=by_sequence, because=because)
        low, high = self.correction_min, self.correction_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"correction_min ({low}) must be below correction_max ({high}); swap or widen them"
            )


def check_norm_length(aggregation: F.Aggregation, norm_length: int | None) -> None:
    """Raises ValueError unless norm_length is given just where the aggregation divides by it."""
    require(
        "norm_length",
        norm_length,
        used=aggregation == "sequence_mean_token_sum_norm",
        because=f"loss_aggregation: {aggregation}",
    )


class PolicyGradient(ABC):
    """Base of the policy-gradient algorithms; a subclass gives `outcome`."""

    def __init__(self, config: PolicyGradientConfig) -> None:
        self.config = config

    @property
    def passes(self) -> tuple[str, ...]:
        return ("old_logprobs", "ref_logprobs") if self.config.kl_coef > 0 else ("old_logprobs",)

    @property
    def num_minibatches(self) -> int:
        return self.config.num_minibatches

    @property
    def num_ppo_epochs(self) -> int:
        return self.config.num_ppo_epochs

    @property
    def dynamic_sampling(self) -> bool:
        return False

    @abstractmethod
    def outcome(self, inputs: OutcomeInputs) -> torch.Tensor:
        """[N]; see Algorithm.outcome."""

    def token_advantages(self, inputs: TokenInputs) -> torch.Tensor:
        """A_it = A_i, less the KL penalty still to come when it is placed in the reward:

            A_it = A_i - kl_coef * sum_{t' >= t} kl_it'

        The penalty joins after the group statistics: it is not divided by the group's std and
        moves no group mean, so kl_coef weighs KL against the advantage as it stands, and the
        expected gradient is that of A_i minus kl_coef times the KL of the whole sequence (for k1).
        """
        missing_M = torch.isnan(inputs.outcome_S).repeat_interleave(inputs.lengths_S)
        advantages_M = inputs.outcome_S.double().repeat_interleave(inputs.lengths_S)
        penalty_M = F.return_to_go(self.reward_penalty(inputs), inputs.lengths_S, gamma=1.0)
        advantages_M = torch.where(missing_M, 0.0, advantages_M - penalty_M)
        return advantages_M.to(inputs.old_logprobs_M.dtype)

    def reward_penalty(self, inputs: TokenInputs) -> torch.Tensor:
        """[M] float64, kl_coef * kl(old, ref) of each token; zeros unless placed in the reward."""
        config, old_M = self.config, inputs.old_logprobs_M.double()
        if config.kl_coef == 0 or config.kl_placement == "loss":
            return torch.zeros_like(old_M)
        ref_M = _given(inputs.ref_logprobs_M).double()
        return config.kl_coef * F.kl_estimate(old_M, ref_M, config.kl_estimator)[0]

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
        """L = sum_t weight_t (w_t policy_t + kl_coef kl_t - entropy_coef H_t) over kept tokens."""
        config, terms = self.config, self._terms(inputs)
        per_token_M = terms.policy_M
        if terms.kl_M is not None and config.kl_placement == "loss":
            # sg(rho) makes the estimate one under the current policy, not the one that sampled.
            kl_M = terms.rho_M.detach() * terms.kl_M if config.kl_unbiased else terms.kl_M
            per_token_M = per_token_M + config.kl_coef * kl_M
        if config.entropy_coef > 0:
            per_token_M = per_token_M - config.entropy_coef * inputs.entropy_M
        loss = weighted(per_token_M, terms.keep_M, inputs.weights_M)
        return loss, loss_metrics(config, inputs, terms, loss)

    def _terms(self, inputs: LossInputs) -> Terms:
        rho_M, keep_M = F.token_ratio(inputs.logprobs_M, inputs.old_logprobs_M)
        ratio_M = rho_M
        if self.config.policy_loss == "gspo":
            ratio_M = F.sequence_ratio(
                inputs.logprobs_M,
                inputs.old_logprobs_M,
                keep_M,
                inputs.sequence_M,
                inputs.num_sequences,
            )
        policy_M, outside_M = self._surrogate(ratio_M, inputs), None
        if self.config.correction != "none":
            weight_M, outside_M, known_M = self._correction(inputs)
            policy_M, keep_M = weight_M * policy_M, keep_M & known_M
        kl_M = None
        if self.config.kl_coef > 0:
            kl_M, known_M = F.kl_estimate(
                inputs.logprobs_M, _given(inputs.ref_logprobs_M), self.config.kl_estimator
            )
            keep_M = keep_M & known_M
        return Terms(policy_M, kl_M, rho_M, ratio_M, keep_M, outside_M)

    def _surrogate(self, ratio_M: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
        config, advantages_M = self.config, inputs.advantages_M
        if config.policy_loss == "reinforce":
            return -advantages_M * inputs.logprobs_M
        assert config.clip_low is not None and config.clip_high is not None, "checked by Config"
        if config.policy_loss == "cispo":
            return F.cispo(
                ratio_M, inputs.logprobs_M, advantages_M, config.clip_low, config.clip_high
            )
        return F.ppo_clip(
            ratio_M, advantages_M, config.clip_low, config.clip_high, config.dual_clip
        )

    def _correction(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[M] each: weight, whether w lies outside the bounds, whether w is known."""
        config = self.config
        log_w_M, keep_M = F.correction_log_weights(
            inputs.old_logprobs_M,
            inputs.rollout_logprobs_M,
            inputs.sequence_M,
            inputs.num_sequences,
            config.correction_sequence,
        )
        low, high = config.correction_min, config.correction_max
        assert high is not None, "checked by Config"
        outside_M = F.outside(log_w_M, low, high)
        if low is None:
            return F.truncated_weights(log_w_M, high), outside_M, keep_M
        return F.mask_weights(log_w_M, low, high), outside_M, keep_M


def _given(ref_logprobs_M: torch.Tensor | None) -> torch.Tensor:
    if ref_logprobs_M is None:
        raise ValueError("kl_coef > 0 needs ref_logprobs; run the ref_logprobs pass")
    return ref_logprobs_M
