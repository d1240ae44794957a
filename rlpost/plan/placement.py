"""Which worker goes to which node, cores and GPUs. Pure: from the sections alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlpost.cluster import gpus
from rlpost.cluster.nodes import Demands, Node, Pins, assign
from rlpost.cluster.workers import Placement
from rlpost.config import RunConfig
from rlpost.roles import engine_roles, trainer_roles


@dataclass(frozen=True)
class Bundle:
    """What one worker takes. `gpus` are counted on the node; several roles may name the same one.

    Bundle("actor", 0, node=0, num_cpus=1, gpus=(2,), share=0.5, cores=())
    """

    role: str
    rank: int
    node: int
    num_cpus: float
    gpus: tuple[int, ...]
    share: float  # of its GPU; 1: all of it
    cores: tuple[int, ...]  # core numbers it is pinned to; empty: any

    @property
    def name(self) -> str:
        return f"{self.role}[{self.rank}]"

    @property
    def device(self) -> str:
        """`GPU 2 (0.5 of it)`, `cores 0, 1`, `CPU`."""
        if self.gpus:
            numbers = ", ".join(map(str, self.gpus))
            return f"GPU {numbers}{f' ({self.share:g} of it)' if self.share < 1 else ''}"
        return f"cores {', '.join(map(str, self.cores))}" if self.cores else "CPU"


def placements(config: RunConfig) -> dict[str, list[Placement]]:
    """Role -> one placement per worker."""
    demands = {}
    for role, parts in trainer_roles(config).items():
        trainer = parts.trainer.config
        rank = Placement(trainer.num_cpus_per_rank, trainer.num_gpus_per_rank, trainer.env)
        demands[role] = [rank] * trainer.world_size
    for role, section in engine_roles(config).items():
        engine = section.config
        replica = Placement(engine.num_cpus_per_engine, engine.num_gpus_per_engine, engine.env)
        demands[role] = [replica] * engine.num_engines
    demands["rollout"] = [Placement(1, 0, {"OMP_NUM_THREADS": "1"})]
    return demands


def bundles(
    demands: Demands, nodes: Sequence[Node], pins: Pins, cores: Mapping[str, Sequence[int]]
) -> list[Bundle]:
    """One for each worker that finds room, by node and device.

    Ray decides which GPU of a node a worker gets; here they are handed out from the first.
    """
    places, _ = assign(demands, nodes, pins)
    given = dict(_devices(demands, places))
    found = [
        Bundle(
            role,
            rank,
            node=node.number,
            num_cpus=0.0 if gpus.is_share(item) else item.num_cpus,
            gpus=given[role, rank],
            share=min(1.0, item.num_gpus) or 1.0,
            cores=tuple(cores.get(role, ())),
        )
        for role, items in demands.items()
        for rank, (item, node) in enumerate(zip(items, places[role], strict=False))
    ]
    return sorted(found, key=_by_node_and_device)


def _devices(
    demands: Demands, places: Mapping[str, Sequence[Node]]
) -> Iterator[tuple[tuple[str, int], tuple[int, ...]]]:
    """((role, rank), its GPUs). Rank r of all roles that share GPUs is on the same one."""
    used: dict[int, int] = {}
    shared: dict[int, int] = {}
    for role, items in demands.items():
        for rank, (item, node) in enumerate(zip(items, places[role], strict=False)):
            first = used.get(node.number, 0)
            if gpus.is_share(item):
                if rank not in shared:
                    shared[rank], used[node.number] = first, first + 1
                yield (role, rank), (shared[rank],)
                continue
            used[node.number] = first + int(item.num_gpus)
            yield (role, rank), tuple(range(first, used[node.number]))


def _by_node_and_device(bundle: Bundle) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """GPU workers first, by device; then the others in the order of their roles."""
    return bundle.node, bundle.gpus or (1 << 30,), bundle.cores or (1 << 30,)


def groups(demands: Demands, colocated: bool) -> list[str]:
    """Roles that share GPUs and take turns there: `GPU of rank 0: actor 0.5 + engine 0.5`."""
    if not colocated:
        return []
    shared = gpus.shares(demands)
    if not shared:
        return [", ".join(role for role in demands if role != "rollout") + " take turns"]
    return [
        f"rank {rank}: " + " + ".join(f"{role} {share:g}" for role, share in parts.items())
        for rank, parts in enumerate(shared)
    ]
