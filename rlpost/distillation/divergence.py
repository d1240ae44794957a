"""Divergence of a student p from a teacher q, on log-probs. Pure; gradients flow through p only.

Letters: M tokens, K ids of the support S (K = V: the whole vocabulary).

    reverse_kl = sum p log(p / q)        forward_kl = sum q log(q / p)
    jsd = beta KL(q || m) + (1 - beta) KL(p || m),  m = beta q + (1 - beta) p  [GKD, 2306.13649]
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from rlpost.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

Kind = Literal["reverse_kl", "forward_kl", "jsd"]
Tail = Literal["bucket", "renormalize", "drop"]

# Least mass outside the support. Rounding of a support that holds everything is of order 1e-7; both
# sides are clamped to the same value there, so that the bucket's term is exactly 0.
MIN_REST = 1e-6


def support_divergence(
    log_p_MK: torch.Tensor,
    log_q_MK: torch.Tensor,
    present_MK: torch.Tensor,
    *,
    kind: Kind,
    beta: float | None,
    tail: Tail,
) -> torch.Tensor:
    """[M] divergence over the ids that are present; what lies outside follows `tail`.

    bucket: one more class with the mass left over, without which a reverse KL could be lowered by
    moving mass out of the support. renormalize: both sides are divided by their mass on S.
    drop: the sum over S alone.
    """
    log_p_MK = torch.where(present_MK, log_p_MK, -math.inf)
    log_q_MK = torch.where(present_MK, log_q_MK, -math.inf)
    inside_p_M, inside_q_M = log_p_MK.logsumexp(dim=1), log_q_MK.logsumexp(dim=1)
    if tail == "renormalize":
        log_p_MK, log_q_MK = log_p_MK - inside_p_M[:, None], log_q_MK - inside_q_M[:, None]
    # Absent entries are set to 0 on both sides before the maths: -inf - -inf would be NaN.
    log_p_MK, log_q_MK = (torch.where(present_MK, side, 0.0) for side in (log_p_MK, log_q_MK))
    terms_MK = terms(log_p_MK, log_q_MK, kind=kind, beta=beta)
    total_M = torch.where(present_MK, terms_MK, 0.0).sum(dim=1)
    if tail == "bucket":
        total_M = total_M + terms(log_rest(inside_p_M), log_rest(inside_q_M), kind=kind, beta=beta)
    return total_M


def log_rest(log_inside: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(log_inside)), the mass left over, at least MIN_REST."""
    return torch.log1p(-log_inside.clamp(max=math.log1p(-MIN_REST)).exp())


def terms(
    log_p: torch.Tensor, log_q: torch.Tensor, *, kind: Kind, beta: float | None
) -> torch.Tensor:
    """What each class adds to the divergence."""
    if kind == "reverse_kl":
        return log_p.exp() * (log_p - log_q)
    if kind == "forward_kl":
        return log_q.exp() * (log_q - log_p)
    log_m = log_mixture(log_p, log_q, beta)
    beta = given(beta)
    return beta * log_q.exp() * (log_q - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)


def slopes(
    log_p: torch.Tensor, log_q: torch.Tensor, *, kind: Kind, beta: float | None
) -> torch.Tensor:
    """p_v dD/dp_v of a full divergence, up to a constant c p_v that the softmax takes out.

    With g = slopes, the gradient for the student's logits is g_v - p_v sum(g).
    """
    if kind == "reverse_kl":
        return log_p.exp() * (log_p - log_q)
    if kind == "forward_kl":
        return -log_q.exp()
    return (1 - given(beta)) * log_p.exp() * (log_p - log_mixture(log_p, log_q, beta))


def log_mixture(log_p: torch.Tensor, log_q: torch.Tensor, beta: float | None) -> torch.Tensor:
    beta = given(beta)
    return torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))


def given(beta: float | None) -> float:
    assert beta is not None, "checked by Config: jsd has a beta"
    return beta
