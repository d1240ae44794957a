"""What the algorithm sees of one optimizer step, and the loss of its micro-batches.

Letters: S sequences and M loss tokens, of a micro-batch or of this rank's share of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlpost.algorithms.base import Algorithm, LossInputs, OutcomeInputs, TokenInputs
from rlpost.errors import TrainerError
from rlpost.metrics import Metric, mean
from rlpost.trainers.megatron import device
from rlpost.trainers.megatron.layout import Layout
from rlpost.trainers.megatron.packing import PackedBatch
from rlpost.types import Array, BatchScalars


def outcomes(algorithm: Algorithm, scalars: BatchScalars) -> dict[str, float]:
    """Sample id -> outcome, from the whole batch: the same on every rank."""
    outcome_N = algorithm.outcome(
        OutcomeInputs(
            rewards_N=torch.tensor(scalars.rewards, dtype=torch.float64),
            group_ids=scalars.group_ids,
            response_lengths_N=torch.tensor(scalars.loss_tokens, dtype=torch.int64),
        )
    )
    return dict(zip(scalars.sample_ids, outcome_N.tolist(), strict=True))


@dataclass(frozen=True)
class Totals:
    """Loss tokens and sequences of one optimizer step over all ranks."""

    tokens: int
    sequences: int


@dataclass(frozen=True)
class Targets:
    """What the algorithm makes of the tokens of one micro-batch [M].

    `targets_M`: advantages for a policy, returns for a critic.
    """

    targets_M: torch.Tensor
    weights_M: torch.Tensor


def totals(shares: Sequence[Sequence[str]], loss_tokens: Mapping[str, int]) -> Totals:
    """Of one optimizer step. Samples without `loss_tokens` are not trained and not counted.

    Raises TrainerError when nothing is left: there is no mean over no tokens.
    """
    counts = [loss_tokens[name] for share in shares for name in share if name in loss_tokens]
    if not sum(counts):
        names = [name for share in shares for name in share]
        raise TrainerError(
            f"a minibatch of {len(names)} samples ({', '.join(names[:3])}, ...) has no token to "
            "train: every loss_mask is 0 or reward missing; drop it before training"
        )
    return Totals(tokens=sum(counts), sequences=len(counts))


def advantages(
    algorithm: Algorithm,
    batches: Sequence[PackedBatch],
    *,
    outcome: Mapping[str, float],
    layout: Layout,
) -> list[torch.Tensor]:
    """[M] for each of the rank's micro-batches of the whole batch.

    All data-parallel ranks call it, also without any micro-batch.
    """
    inputs = token_inputs(algorithm.passes, batches, outcome=outcome, layout=layout)
    return cut(algorithm.token_advantages(inputs), batches)


def token_inputs(
    passes: Sequence[str],
    batches: Sequence[PackedBatch],
    *,
    outcome: Mapping[str, float],
    layout: Layout,
) -> TokenInputs:
    """Without an old_logprobs pass the algorithm gets NaN for them: they are not known yet."""
    lengths_S = _lengths(batches)
    outcome_S = [outcome[name] for batch in batches for name in batch.sample_ids]
    given = {name: _column(batches, name) for name in passes}
    unknown_M = torch.full((int(lengths_S.sum()),), torch.nan, device=device.device())
    return TokenInputs(
        outcome_S=torch.tensor(outcome_S, dtype=torch.float32, device=device.device()),
        lengths_S=lengths_S,
        old_logprobs_M=given.get("old_logprobs", unknown_M),
        ref_logprobs_M=given.get("ref_logprobs"),
        reduce_sum=layout.sum_over_data,
        values_M=given.get("values"),
    )


def weights(
    algorithm: Algorithm, batches: Sequence[PackedBatch], totals: Totals
) -> list[torch.Tensor]:
    """[M] for each of the rank's micro-batches of one optimizer step."""
    weights_M = algorithm.aggregation_weights(_lengths(batches), totals.tokens, totals.sequences)
    return cut(weights_M, batches)


def _lengths(batches: Sequence[PackedBatch]) -> torch.Tensor:
    return to_device(np.concatenate([np.zeros(0, np.int64), *(b.lengths_S for b in batches)]))


def cut(values_M: torch.Tensor, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
    """[M] of all micro-batches -> [M] of each, float32."""
    return list(torch.split(values_M.float(), [batch.num_loss_tokens for batch in batches]))


def loss(
    logprobs_M: torch.Tensor,
    entropy_M: torch.Tensor,
    batch: PackedBatch,
    *,
    algorithm: Algorithm,
    target: Targets,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """(loss of the micro-batch, metrics). Sums over micro-batches and ranks give the step's."""
    columns = {name: to_device(values) for name, values in batch.columns.items()}
    old_M = columns.get("old_logprobs", logprobs_M.detach())
    value, metrics = algorithm.loss(
        LossInputs(
            logprobs_M=logprobs_M,
            entropy_M=entropy_M,
            old_logprobs_M=old_M,
            rollout_logprobs_M=columns["rollout_logprobs"],
            ref_logprobs_M=columns.get("ref_logprobs"),
            advantages_M=target.targets_M,
            weights_M=target.weights_M,
            sequence_M=to_device(batch.sequence_M),
            num_sequences=len(batch.sample_ids),
        )
    )
    measured = measure(entropy_M.detach(), old_M, columns["rollout_logprobs"])
    return value, {**metrics, **measured}


def measure(
    entropy_M: torch.Tensor, old_M: torch.Tensor, rollout_M: torch.Tensor
) -> dict[str, Metric]:
    """Entropy, and how far trainer and engine disagree on the same tokens and weights.

    d = rollout - old; k3 = exp(-d) + d - 1 estimates KL(engine || trainer)
    [http://joschu.net/blog/kl-approx.html]. Tokens that no engine sampled (NaN) are left out.
    """
    known_M = ~rollout_M.isnan()
    gap_M = torch.where(known_M, rollout_M - old_M, 0.0)
    k3_M = torch.expm1(-gap_M) + gap_M
    size_M = gap_M.abs()
    # One transfer from the device for all numbers.
    parts = [entropy_M.sum(), known_M.sum(), k3_M.sum(), size_M.sum(), size_M.max()]
    entropy, known, k3, size, largest = torch.stack([part.double() for part in parts]).tolist()
    metrics = {
        "train/entropy": mean(entropy, len(entropy_M)),
        "perf/trained_tokens": Metric("sum", len(entropy_M)),
    }
    if known:
        metrics["train/mismatch/k3"] = mean(k3, known)
        metrics["train/mismatch/mean_abs"] = mean(size, known)
        metrics["train/mismatch/max"] = Metric("max", largest)
    return metrics


def _column(batches: Sequence[PackedBatch], name: str) -> torch.Tensor:
    return to_device(np.concatenate([np.zeros(0, np.float32), *(b.columns[name] for b in batches)]))


def to_device(array: Array) -> torch.Tensor:
    return torch.from_numpy(array).to(device.device())
