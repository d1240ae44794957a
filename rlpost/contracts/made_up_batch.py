"""A made-up ragged batch with a missing reward, and what an algorithm makes of it.

Letters as in rlpost/algorithms/base.py: N = S sequences, M loss tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from rlpost.algorithms.base import LossInputs, OutcomeInputs, TokenInputs
from rlpost.contracts.report import require
from rlpost.functional import sequence_numbers
from rlpost.lazy import LazyModule
from rlpost.validation import Section

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

LENGTHS = (3, 1, 4, 2, 5, 2)
REWARDS = (1.0, 0.0, 0.25, math.nan, 0.5, 0.75)
GROUPS = ("a", "b", "a", "b", "a", "b")
MISSING = 3  # whose reward is NaN


def column(seed: int, low: float, high: float) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    size = sum(LENGTHS)
    return low + (high - low) * torch.rand(size, generator=source, dtype=torch.float64)


@dataclass
class Case:
    """One algorithm and what it made of the batch so far."""

    section: Section

    @property
    def algorithm(self) -> Any:
        return self.section.target(self.section.config)

    def outcome(self) -> torch.Tensor:
        rewards = torch.tensor(REWARDS, dtype=torch.float64)
        outcome: torch.Tensor = self.algorithm.outcome(
            OutcomeInputs(rewards, GROUPS, torch.tensor(LENGTHS))
        )
        return outcome

    def token_inputs(self) -> TokenInputs:
        return TokenInputs(
            self.outcome(),
            torch.tensor(LENGTHS),
            column(2, -2, -1),
            column(4, -2, -1),
            lambda value: value,
            values_M=column(6, -0.5, 1),
        )

    def trained(self) -> torch.Tensor:
        """[M] whether a token's sample has an outcome; by the algorithm's own word."""
        known_S = ~torch.isnan(self.outcome())
        return known_S[sequence_numbers(torch.tensor(LENGTHS))]

    def weights(self) -> torch.Tensor:
        """[M] as a trainer makes them: totals of trained samples only, 0 for all others."""
        lengths, known_S = torch.tensor(LENGTHS), ~torch.isnan(self.outcome())
        total = int(lengths[known_S].sum())
        weights: torch.Tensor = self.algorithm.aggregation_weights(
            lengths, total, int(known_S.sum())
        )
        require(
            tuple(weights.shape) == (sum(LENGTHS),),
            f"it gave shape {tuple(weights.shape)}; [M] = [{sum(LENGTHS)}] is wanted",
        )
        return torch.where(self.trained(), weights.double(), 0.0)

    def loss_inputs(self) -> LossInputs:
        lengths = torch.tensor(LENGTHS)
        return LossInputs(
            logprobs_M=column(1, -2, -1).requires_grad_(),
            entropy_M=column(5, 0, 3).requires_grad_(),
            old_logprobs_M=column(2, -2, -1),
            rollout_logprobs_M=column(3, -2, -1),
            ref_logprobs_M=column(4, -2, -1),
            advantages_M=self.algorithm.token_advantages(self.token_inputs()),
            weights_M=self.weights(),
            sequence_M=sequence_numbers(lengths),
            num_sequences=len(LENGTHS),
        )

    def gradient(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and its gradient by the log-probs, from fresh leaves."""
        fresh = replace(
            inputs,
            logprobs_M=inputs.logprobs_M.detach().clone().requires_grad_(),
            entropy_M=inputs.entropy_M.detach().clone().requires_grad_(),
        )
        loss, _ = self.algorithm.loss(fresh)
        require(
            loss.requires_grad,
            "the loss has no gradient; compute it from inputs.logprobs_M, without detach()",
        )
        loss.backward()
        grad = fresh.logprobs_M.grad
        require(grad is not None, "no gradient reaches inputs.logprobs_M; the loss must use them")
        assert grad is not None
        return loss.detach(), grad


def micro_batches(inputs: LossInputs) -> Iterator[LossInputs]:
    """The first half of the sequences and the second, as micro-batches of their own."""
    half = len(LENGTHS) // 2
    for start, stop in ((0, half), (half, len(LENGTHS))):
        chosen = (inputs.sequence_M >= start) & (inputs.sequence_M < stop)
        columns = {
            field.name: getattr(inputs, field.name)[chosen]
            for field in fields(LossInputs)
            if isinstance(getattr(inputs, field.name), torch.Tensor)
        }
        columns["sequence_M"] = columns["sequence_M"] - start
        yield LossInputs(**columns, num_sequences=stop - start)
