"""KL to the reference, and how per-token losses are summed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rlpost.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

KlEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal[
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
]


def kl_estimate(
    logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor, estimator: KlEstimator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token estimate of KL(policy || reference) from sampled tokens, and keep.

    d = l - ref; k1 = d, k2 = d^2/2, k3 = exp(-d) + d - 1 [Schulman, "Approximating KL divergence"].
    0 (and no gradient) where it is not finite.
    """
    d_M = logprobs_M - ref_logprobs_M
    keep_M = torch.isfinite(d_M) & torch.isfinite((-d_M.detach()).exp())
    d_M = torch.where(keep_M, d_M, 0.0)
    if estimator == "k1":
        return d_M, keep_M
    if estimator == "k2":
        return d_M**2 / 2, keep_M
    return torch.exp(-d_M) + d_M - 1, keep_M


def aggregation_weights(
    lengths_S: torch.Tensor,
    total_tokens: int,
    total_sequences: int,
    aggregation: Aggregation,
    norm_length: int | None,
) -> torch.Tensor:
    """[M] weights with which per-token losses are summed over the whole optimizer step.

    Only a sequence's own length and the step's totals enter, so micro-batches, packing and ranks
    don't change the result.
    """
    weights_S = torch.ones_like(lengths_S, dtype=torch.float32)
    if aggregation == "token_mean":
        weights_S = weights_S / max(total_tokens, 1)
    else:
        weights_S = weights_S / max(total_sequences, 1)
    if aggregation == "sequence_mean_token_mean":
        weights_S = weights_S / lengths_S.clamp(min=1)
    if aggregation == "sequence_mean_token_sum_norm":
        assert norm_length is not None, "the config demands norm_length for this aggregation"
        weights_S = weights_S / norm_length
    return weights_S.repeat_interleave(lengths_S)
