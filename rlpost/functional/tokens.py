"""Advantages of tokens, and sums over the tokens of sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlpost.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

EPS = 1e-6


def sequence_numbers(lengths_S: torch.Tensor) -> torch.Tensor:
    """[M] which sequence each token belongs to."""
    numbers_S = torch.arange(len(lengths_S), device=lengths_S.device)
    return numbers_S.repeat_interleave(lengths_S)


def return_to_go(rewards_M: torch.Tensor, lengths_S: torch.Tensor, gamma: float) -> torch.Tensor:
    """G_t = sum_{t' >= t} gamma^(t'-t) r_t' within each sequence, over its loss tokens only.

    Doubling scan: after the pass with distance d every entry holds its next 2d rewards.
    """
    sequence_M = sequence_numbers(lengths_S)
    longest = int(lengths_S.max()) if len(lengths_S) else 0
    returns_M, distance = rewards_M, 1
    while distance < longest:
        same = sequence_M[distance:] == sequence_M[:-distance]
        ahead = torch.where(same, returns_M[distance:], 0.0) * gamma**distance
        returns_M = torch.cat([returns_M[:-distance] + ahead, returns_M[-distance:]])
        distance *= 2
    return returns_M


def at_last_token(values_S: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """[M] the value at the last loss token of each sequence, 0 elsewhere."""
    filled_S = lengths_S > 0
    placed_M = values_S.new_zeros(int(lengths_S.sum()))
    placed_M[lengths_S.cumsum(0)[filled_S] - 1] = values_S[filled_S]
    return placed_M


def gae(
    rewards_M: torch.Tensor,
    values_M: torch.Tensor,
    lengths_S: torch.Tensor,
    gamma: float,
    lam: float,
) -> torch.Tensor:
    """A_t = d_t + gamma lam A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t [GAE, arXiv:1506.02438].

    t + 1 is the sequence's next loss token; V and A are 0 after its last one.
    """
    last_M = at_last_token(torch.ones_like(lengths_S), lengths_S).bool()
    next_M = torch.where(last_M, 0.0, values_M.roll(-1))
    return return_to_go(rewards_M + gamma * next_M - values_M, lengths_S, gamma * lam)


def whiten(
    values_M: torch.Tensor,
    keep_M: torch.Tensor,
    reduce_sum: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """(x - mean) / (std + eps), population std, over the kept tokens of all ranks; 0 elsewhere.

    Two passes (mean, then deviations), so a large mean costs no digits.
    """
    deviations_M = centred(values_M, keep_M, reduce_sum)
    parts = torch.stack([(deviations_M**2).sum(), keep_M.double().sum()])
    squares, count = reduce_sum(parts)
    return deviations_M / (torch.sqrt(squares / count.clamp(min=1)) + EPS)


def centred(
    values_M: torch.Tensor,
    keep_M: torch.Tensor,
    reduce_sum: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """float64 x - mean, the mean over the kept tokens of all ranks; 0 elsewhere."""
    values_M = values_M.double()
    kept_M = torch.where(keep_M, values_M, 0.0)
    total, count = reduce_sum(torch.stack([kept_M.sum(), keep_M.double().sum()]))
    return torch.where(keep_M, values_M - total / count.clamp(min=1), 0.0)


def sequence_mean(
    values_M: torch.Tensor, keep_M: torch.Tensor, sequence_M: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """[S] mean of each sequence's kept tokens; 0 for a sequence without any."""
    totals_S = sequence_sum(torch.where(keep_M, values_M, 0.0), sequence_M, num_sequences)
    counts_S = sequence_sum(keep_M.to(values_M.dtype), sequence_M, num_sequences)
    return totals_S / counts_S.clamp(min=1)


def sequence_sum(
    values_M: torch.Tensor, sequence_M: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """[S] sum of each sequence's tokens."""
    return values_M.new_zeros(num_sequences).index_add(0, sequence_M, values_M)
