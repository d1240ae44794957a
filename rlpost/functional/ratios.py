"""Ratios of the policy to the one that sampled: surrogates, and the off-policy correction.

w = exp(old - roll), the trainer's policy before the update against the engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rlpost.functional.tokens import sequence_mean, sequence_sum
from rlpost.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

SequenceMean = Literal["geometric", "product"]


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
    return (~outside(log_w_M, lowest, highest)).to(log_w_M.dtype)


def outside(log_w_M: torch.Tensor, lowest: float | None, highest: float) -> torch.Tensor:
    """Whether w lies above `highest`, or below `lowest` where there is one."""
    weight_M = log_w_M.exp()
    above_M = weight_M > highest
    return above_M if lowest is None else above_M | (weight_M < lowest)
