"""Spreads samples over ranks and micro-batches by tokens. Pure and deterministic."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def balanced_split(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of `lengths` in `num_parts` lists of nearly equal token sums; every index once.

    Longest first, each to the part with the fewest tokens so far (LPT; the fullest part holds at
    most 4/3 of the best possible [Graham 1969]). Ties go to the lower index, so the result is a
    function of its arguments alone. Indices ascend within a part; with fewer samples than parts
    some parts are empty.

        balanced_split([5, 3, 3, 1], 2) == [[0, 3], [1, 2]]
    """
    if num_parts < 1:
        raise ValueError(f"num_parts ({num_parts}) must be at least 1")
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0, part) for part in range(num_parts)]
    for index in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        load, part = heapq.heappop(loads)
        parts[part].append(index)
        heapq.heappush(loads, (load + lengths[index], part))
    return [sorted(part) for part in parts]


def budget_split(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in the fewest balanced lists whose token sums stay within `budget`.

    A sample is never cut: one that is longer than the budget gets a list of its own.
    """
    if budget < 1:
        raise ValueError(f"the token budget ({budget}) must be at least 1")
    alone = [[index] for index, length in enumerate(lengths) if length > budget]
    shared = [index for index, length in enumerate(lengths) if length <= budget]
    return alone + _fit([lengths[index] for index in shared], shared, budget)


def _fit(lengths: Sequence[int], indices: Sequence[int], budget: int) -> list[list[int]]:
    """At most len(lengths) parts are tried: then each sample stands alone, and fits."""
    num_parts = math.ceil(sum(lengths) / budget)
    while num_parts:
        parts = balanced_split(lengths, num_parts)
        if all(sum(lengths[row] for row in part) <= budget for part in parts):
            return [[indices[row] for row in part] for part in parts if part]
        num_parts += 1
    return []
