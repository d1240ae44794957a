"""Pure tensor maths of policy-gradient losses: values in, values out, nothing logged.

Letters: N samples of a batch, S sequences, M loss tokens of S sequences laid end to end.
Only loss tokens stand in [M] arrays, so there are no masks for prompts or environment tokens.
A missing reward is NaN: it enters no statistic and comes out as NaN. A token whose numbers are not
finite is dropped: functions that may meet one return `keep_M` beside their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlpost.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

Std = Literal["sample", "population"]
Singleton = Literal["zero", "raw"]
KlEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal[
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
]
SequenceMean = Literal["geometric", "product"]

EPS = 1e-6


# Advantages of whole samples


@dataclass(frozen=True)
class GroupStats:
    """Statistics of each sample's group over the rewards that are present, one row per sample."""

    count_N: torch.Tensor
    mean_N: torch.Tensor
    squares_N: torch.Tensor  # sum of squared deviations from the mean
    constant_N: torch.Tensor  # bool: all present rewards of the group are equal


def group_stats(rewards_N: torch.Tensor, group_ids: Sequence[str]) -> GroupStats:
    """Statistics by group id, never by position, so groups may be ragged or interleaved.

    Raises ValueError for an infinite reward.
    """
    if torch.isinf(rewards_N).any():
        raise ValueError("a reward is infinite; a reward must be a number, or missing (NaN)")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(group_ids))}
    index_N = torch.tensor([numbers[name] for name in group_ids], device=rewards_N.device).long()
    present_N = ~torch.isnan(rewards_N)

    def total(values_N: torch.Tensor) -> torch.Tensor:
        return values_N.new_zeros(len(numbers)).index_add(0, index_N, values_N)[index_N]

    def extreme(sign: float) -> torch.Tensor:
        values_N = torch.where(present_N, sign * rewards_N, -torch.inf)
        start = rewards_N.new_full((len(numbers),), -torch.inf)
        return sign * start.scatter_reduce(0, index_N, values_N, "amax")[index_N]

    count_N = total(present_N.to(rewards_N.dtype))
    mean_N = total(torch.where(present_N, rewards_N, 0.0)) / count_N.clamp(min=1)
    squares_N = total(torch.where(present_N, rewards_N - mean_N, 0.0) ** 2)
    return GroupStats(count_N, mean_N, squares_N, extreme(1.0) == extreme(-1.0))


def _settle(
    advantages_N: torch.Tensor, rewards_N: torch.Tensor, stats: GroupStats, singleton: Singleton
) -> torch.Tensor:
    """Constant groups exactly 0 (rounding aside), groups of one by rule, missing stays NaN."""
    advantages_N = torch.where(stats.constant_N, 0.0, advantages_N)
    if singleton == "raw":
        advantages_N = torch.where(stats.count_N == 1, rewards_N, advantages_N)
    return torch.where(torch.isnan(rewards_N), torch.nan, advantages_N)


def group_centered(
    rewards_N: torch.Tensor, group_ids: Sequence[str], singleton: Singleton
) -> torch.Tensor:
    """A = R_i - mean_g [Dr.GRPO, arXiv:2503.20783]."""
    stats = group_stats(rewards_N, group_ids)
    return _settle(rewards_N - stats.mean_N, rewards_N, stats, singleton)


def group_normalized(
    rewards_N: torch.Tensor, group_ids: Sequence[str], std: Std, singleton: Singleton
) -> torch.Tensor:
    """A = (R_i - mean_g) / (std_g + eps) [GRPO, arXiv:2402.03300]; std with n-1 or n below."""
    stats = group_stats(rewards_N, group_ids)
    below_N = (stats.count_N - int(std == "sample")).clamp(min=1)
    std_N = torch.sqrt(stats.squares_N / below_N)
    return _settle((rewards_N - stats.mean_N) / (std_N + EPS), rewards_N, stats, singleton)


def leave_one_out(
    rewards_N: torch.Tensor, group_ids: Sequence[str], singleton: Singleton
) -> torch.Tensor:
    """A = R_i - sum_{j != i} R_j / (G-1) [RLOO, arXiv:2402.14740]."""
    stats = group_stats(rewards_N, group_ids)
    others_N = stats.mean_N * stats.count_N - rewards_N
    advantages_N = rewards_N - others_N / (stats.count_N - 1).clamp(min=1)
    return _settle(advantages_N, rewards_N, stats, singleton)


# Advantages of tokens


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
    deviations_M = _centred(values_M, keep_M, reduce_sum)
    parts = torch.stack([(deviations_M**2).sum(), keep_M.double().sum()])
    squares, count = reduce_sum(parts)
    return deviations_M / (torch.sqrt(squares / count.clamp(min=1)) + EPS)


def _centred(
    values_M: torch.Tensor,
    keep_M: torch.Tensor,
    reduce_sum: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """float64 x - mean, the mean over the kept tokens of all ranks; 0 elsewhere."""
    values_M = values_M.double()
    kept_M = torch.where(keep_M, values_M, 0.0)
    total, count = reduce_sum(torch.stack([kept_M.sum(), keep_M.double().sum()]))
    return torch.where(keep_M, values_M - total / count.clamp(min=1), 0.0)


# Ratios and surrogates


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


def token_ratio(
    logprobs_M: torch.Tensor, old_logprobs_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """rho = exp(l - old) and keep; 1 (and no gradient) where it is not finite."""
    log_ratio_M = logprobs_M - old_logprobs_M
    # exp(-inf) is a finite 0, so the exponent is looked at as well.
    keep_M = torch.isfinite(log_ratio_M) & torch.isfinite(log_ratio_M.detach().exp())
    return torch.exp(torch.where(keep_M, log_ratio_M, 0.0)), keep_M


def sequence_ratio(
    logprobs_M: torch.Tensor,
    old_logprobs_M: torch.Tensor,
    keep_M: torch.Tensor,
    sequence_M: torch.Tensor,
    num_sequences: int,
) -> torch.Tensor:
    """Token form of s_i = exp(mean_t(l - old)): sg(s_i) exp(l - sg(l)) [GSPO, arXiv:2507.18071].

    The mean is over the sequence's own kept loss tokens, whatever its neighbours' lengths.
    """
    log_ratio_M = (logprobs_M - old_logprobs_M).detach()
    means_S = sequence_mean(log_ratio_M, keep_M, sequence_M, num_sequences)
    safe_M = torch.where(keep_M, logprobs_M, 0.0)
    return means_S.exp()[sequence_M] * torch.exp(safe_M - safe_M.detach())


def ppo_clip(
    ratio_M: torch.Tensor,
    advantages_M: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> torch.Tensor:
    """-min(rho A, clip(rho, 1-c_low, 1+c_high) A) [PPO, arXiv:1707.06347 eq. 7].

    Two bounds: DAPO, arXiv:2503.14476. Dual clip [arXiv:1912.09729 eq. 5]: for A < 0 the objective
    is no lower than c A, so the loss is no higher than -c A and a huge ratio can't blow it up.
    """
    clipped_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    loss_M = torch.maximum(-ratio_M * advantages_M, -clipped_M * advantages_M)
    if dual_clip is None:
        return loss_M
    return torch.where(advantages_M < 0, torch.minimum(loss_M, -dual_clip * advantages_M), loss_M)


def cispo(
    ratio_M: torch.Tensor,
    logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """-sg(clip(rho, 1-c_low, 1+c_high)) A l [CISPO, arXiv:2506.13585].

    The clip bounds a weight, so no token loses its gradient.
    """
    return -ratio_M.detach().clamp(1 - clip_low, 1 + clip_high) * advantages_M * logprobs_M


# Values


def clipped_value_loss(
    values_M: torch.Tensor,
    old_values_M: torch.Tensor,
    returns_M: torch.Tensor,
    clip: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """0.5 max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2), and where the clip takes effect.

    As in OpenAI's baselines: a token whose value has moved by more than `clip` away from V_old
    towards G has no gradient. Without `clip` it is the squared error.
    """
    loss_M = (values_M - returns_M) ** 2
    if clip is None:
        return 0.5 * loss_M, torch.zeros_like(loss_M, dtype=torch.bool)
    bounded_M = torch.clamp(values_M, old_values_M - clip, old_values_M + clip)
    bounded_loss_M = (bounded_M - returns_M) ** 2
    return 0.5 * torch.maximum(loss_M, bounded_loss_M), bounded_loss_M > loss_M


def explained_variance(
    values_M: torch.Tensor,
    returns_M: torch.Tensor,
    keep_M: torch.Tensor,
    reduce_sum: Callable[[torch.Tensor], torch.Tensor],
) -> float:
    """1 - Var(G - V) / Var(G) over the kept tokens of all ranks; NaN when all returns are equal."""
    centred = [
        _centred(column_M, keep_M, reduce_sum) for column_M in (returns_M - values_M, returns_M)
    ]
    left, total = reduce_sum(torch.stack([(part_M**2).sum() for part_M in centred])).tolist()
    return 1.0 - left / total if total > 0 else float("nan")


# Off-policy correction, w = exp(old - roll)


def correction_log_weights(
    old_logprobs_M: torch.Tensor,
    rollout_logprobs_M: torch.Tensor,
    sequence_M: torch.Tensor,
    num_sequences: int,
    sequence: SequenceMean | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log w of each token (or of its sequence: geometric mean or product) and keep; detached."""
    log_w_M = (old_logprobs_M - rollout_logprobs_M).detach()
    keep_M = torch.isfinite(log_w_M)
    log_w_M = torch.where(keep_M, log_w_M, 0.0)
    if sequence == "geometric":
        log_w_M = sequence_mean(log_w_M, keep_M, sequence_M, num_sequences)[sequence_M]
    if sequence == "product":
        log_w_M = sequence_sum(log_w_M, sequence_M, num_sequences)[sequence_M]
    return log_w_M, keep_M


def truncated_weights(log_w_M: torch.Tensor, highest: float) -> torch.Tensor:
    """min(w, C), truncated importance sampling."""
    return log_w_M.exp().clamp(max=highest)


def mask_weights(log_w_M: torch.Tensor, lowest: float, highest: float) -> torch.Tensor:
    """1 where w lies in [lowest, highest], else 0 (IcePop)."""
    weight_M = log_w_M.exp()
    return ((weight_M >= lowest) & (weight_M <= highest)).to(log_w_M.dtype)


# KL to the reference, aggregation


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
