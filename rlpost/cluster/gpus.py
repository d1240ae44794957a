"""Which GPUs the roles take: whole ones, or shares of GPUs on which roles take turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlpost.cluster.workers import Placement

NODE_LABEL = "ray.io/node-id"  # Ray gives it to every node
ROUNDING = 1e-6  # shares such as 0.7 + 0.2 + 0.1 make one GPU


class SharedGpus:
    """One bundle of a whole GPU for each rank; all roles' workers of that rank are put into it.

    Left alone, Ray would pack the shares of two ranks of one role on one GPU, which NCCL refuses.
    """

    def __init__(self) -> None:
        self._bundles: dict[int, Any] = {}

    def options(self, rank: int, num_gpus: float, node_id: str | None) -> dict[str, Any]:
        """Of a Ray actor. It counts as no CPU: the bundle has none to give."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if rank not in self._bundles:
            on_node = None if node_id is None else [{NODE_LABEL: node_id}]
            self._bundles[rank] = placement_group([{"GPU": 1}], bundle_label_selector=on_node)
        strategy = PlacementGroupSchedulingStrategy(self._bundles[rank], 0)
        return {"num_cpus": 0, "num_gpus": num_gpus, "scheduling_strategy": strategy}


def is_share(placement: Placement) -> bool:
    return 0 < placement.num_gpus < 1


def num_gpus(demands: Mapping[str, Sequence[Placement]]) -> float:
    """GPUs that all roles need together. Rank 1 of the actor shares with rank 1 of the engines."""
    whole = sum(item.num_gpus for items in demands.values() for item in items if not is_share(item))
    return whole + len(shares(demands))


def shares(demands: Mapping[str, Sequence[Placement]]) -> list[dict[str, float]]:
    """Role -> share, for each shared GPU."""
    ranks = [
        {role: items[rank].num_gpus for role, items in demands.items() if is_share_of(items, rank)}
        for rank in range(max(map(len, demands.values()), default=0))
    ]
    return [rank for rank in ranks if rank]


def is_share_of(items: Sequence[Placement], rank: int) -> bool:
    return rank < len(items) and is_share(items[rank])


def overfull(demands: Mapping[str, Sequence[Placement]]) -> Iterator[str]:
    """The roles of each shared GPU whose shares are more than the whole."""
    for parts in shares(demands):
        if sum(parts.values()) > 1 + ROUNDING:
            yield " + ".join(f"{role} {share:g}" for role, share in parts.items())
