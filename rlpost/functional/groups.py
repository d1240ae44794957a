"""Advantages of whole samples, from the rewards of their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlpost.functional.tokens import EPS
from rlpost.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

Std = Literal["sample", "population"]
Singleton = Literal["zero", "raw"]


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
