"""The loss of a critic, and how well it explains the returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlpost.functional.tokens import centred
from rlpost.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


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
    parts = [
        centred(column_M, keep_M, reduce_sum) for column_M in (returns_M - values_M, returns_M)
    ]
    left, total = reduce_sum(torch.stack([(part_M**2).sum() for part_M in parts])).tolist()
    return 1.0 - left / total if total > 0 else float("nan")
