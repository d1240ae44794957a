"""The contract of an algorithm: advantages and loss, pure. It never logs and holds no state.

Letters: N samples of the batch, S sequences of a micro-batch, M loss tokens of a micro-batch.
Only tokens with loss_mask 1 reach an algorithm, so no masks appear in the maths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlpost.metrics import Metric

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OutcomeInputs:
    """The whole batch's scalars, the same on every rank. rewards may hold NaN (missing)."""

    rewards_N: torch.Tensor  # float64
    group_ids: Sequence[str]  # [N]
    response_lengths_N: torch.Tensor  # int64, loss tokens of each sample


@dataclass(frozen=True)
class TokenInputs:
    """This rank's loss tokens of the whole batch, sequences end to end (M tokens of S).

    All optimizer steps of a batch share these advantages: whitening is over the batch.
    """

    outcome_S: torch.Tensor  # Algorithm.outcome() of each sequence; NaN: it is not trained
    lengths_S: torch.Tensor  # int64, loss tokens of each sequence; sums to M
    old_logprobs_M: torch.Tensor
    ref_logprobs_M: torch.Tensor | None
    reduce_sum: Callable[
        [torch.Tensor], torch.Tensor
    ]  # sums a small tensor over data-parallel ranks
    values_M: torch.Tensor | None = None  # the critic's, before its update


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of the current optimizer step. Gradients flow through the first two only.

    weights_M already holds the aggregation over the *whole* optimizer step, across micro-batches
    and ranks: a loss term is sum(weights_M * per_token_loss_M), never a mean.
    """

    logprobs_M: torch.Tensor  # current policy
    entropy_M: torch.Tensor  # full-vocabulary entropy, nats
    old_logprobs_M: torch.Tensor
    rollout_logprobs_M: torch.Tensor
    ref_logprobs_M: torch.Tensor | None
    advantages_M: torch.Tensor
    weights_M: torch.Tensor
    sequence_M: torch.Tensor  # int64, 0..S-1, ascending: which sequence a token belongs to
    num_sequences: int


@dataclass(frozen=True)
class ValueLossInputs:
    """One micro-batch of a critic's optimizer step; weights_M as in LossInputs."""

    values_M: torch.Tensor  # current critic; gradients flow through these only
    old_values_M: torch.Tensor  # of the values pass
    returns_M: torch.Tensor
    weights_M: torch.Tensor


class Algorithm(Protocol):
    """One file per algorithm; built from its Config.

    `passes`: the passes it needs before training, in order ("old_logprobs", "ref_logprobs").
    `num_minibatches` optimizer steps per visit of a batch, `num_ppo_epochs` visits.
    `dynamic_sampling`: groups whose rewards are all equal are dropped and replaced.
    """

    @property
    def passes(self) -> tuple[str, ...]: ...

    @property
    def num_minibatches(self) -> int: ...

    @property
    def num_ppo_epochs(self) -> int: ...

    @property
    def dynamic_sampling(self) -> bool: ...

    def outcome(self, inputs: OutcomeInputs) -> torch.Tensor:
        """[N] what each sample carries into `token_advantages` (group-normalised for GRPO).

        NaN marks a sample that is not trained (its reward is missing): it counts in no total of
        `aggregation_weights`, and its tokens' weights are 0 so that no loss term trains on it.
        """

    def token_advantages(self, inputs: TokenInputs) -> torch.Tensor:
        """[M] finite advantages, 0 where the outcome is NaN; whitening uses `reduce_sum`."""

    def aggregation_weights(
        self, lengths_S: torch.Tensor, total_tokens: int, total_sequences: int
    ) -> torch.Tensor:
        """[M] weight of each loss token; totals are those of the whole optimizer step."""

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Scalar loss to minimise and its metrics (detached)."""


class ValueAlgorithm(Algorithm, Protocol):
    """An algorithm with a critic: `values` is among its passes.

    `critic_passes`: those of `passes` that `returns` reads; the only ones that run during the
    first `num_critic_only_steps` batches, in which the actor is not trained.
    """

    @property
    def critic_passes(self) -> tuple[str, ...]: ...

    @property
    def num_critic_only_steps(self) -> int: ...

    def returns(self, inputs: TokenInputs) -> torch.Tensor:
        """[M] finite targets of the values; 0 where the outcome is NaN."""

    def value_loss(self, inputs: ValueLossInputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Scalar loss to minimise and its metrics (detached)."""
