"""Which node each rank goes to. Pure: what Ray knows comes in, and what is missing goes out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost.cluster import gpus
from rlpost.cluster.gpus import ROUNDING

if TYPE_CHECKING:
    from rlpost.cluster.workers import Placement

Demands = Mapping[str, Sequence["Placement"]]
Pins = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Node:
    """One machine of a cluster and what is free there. Pins name it by `number`, from 0.

    Node(0, "10.0.0.7", num_cpus=8, num_gpus=4, id="5d0e...")
    """

    number: int
    address: str
    num_cpus: float
    num_gpus: float
    id: str = ""

    def __str__(self) -> str:
        return f"node {self.number} ({self.address}: {amount(self.num_cpus, self.num_gpus)})"


@dataclass(frozen=True)
class Block:
    """Ranks that go together: those of one role, or the shared GPUs of the roles that take turns.

    A shared GPU counts no CPU, as in Ray's bundle for it.
    """

    roles: tuple[str, ...]
    ranks: tuple[tuple[float, float], ...]  # (CPUs, GPUs) of each
    allowed: tuple[int, ...] | None  # node numbers; None: any


@dataclass(frozen=True)
class Shortage:
    """A rank for which no node has room."""

    roles: tuple[str, ...]
    num_cpus: float
    num_gpus: float
    allowed: tuple[int, ...] | None


def assign(
    demands: Demands, nodes: Sequence[Node], pins: Pins
) -> tuple[dict[str, list[Node]], list[Shortage]]:
    """Role -> node of each rank, in node order, and the ranks that found no room.

    A role that fits on one node is put there; another fills the nodes one after the other. Pinned
    roles come first, then those whose ranks take the most GPUs.
    """
    free = {node.number: [node.num_cpus, node.num_gpus] for node in nodes}
    places: dict[str, list[Node]] = {role: [] for role in demands}
    missing: list[Shortage] = []
    for block in sorted(blocks(demands, pins), key=_hardest_first):
        chosen = _choose(block, nodes, free)
        for role in block.roles:
            # Of roles that share GPUs one may have fewer ranks than another.
            places[role] = [node for node in chosen if node][: len(demands[role])]
        missing += [
            Shortage(block.roles, *rank, block.allowed)
            for rank, node in zip(block.ranks, chosen, strict=True)
            if node is None
        ]
    return places, missing


def blocks(demands: Demands, pins: Pins) -> Iterator[Block]:
    sharing = tuple(role for role, items in demands.items() if any(map(gpus.is_share, items)))
    if sharing:
        pinned = [tuple(pins[role]) for role in sharing if role in pins]
        ranks = ((0.0, 1.0),) * len(gpus.shares(demands))
        yield Block(sharing, ranks, pinned[0] if pinned else None)
    for role, items in demands.items():
        if role not in sharing:
            allowed = tuple(pins[role]) if role in pins else None
            yield Block((role,), tuple((i.num_cpus, i.num_gpus) for i in items), allowed)


def split_pins(demands: Demands, pins: Pins) -> list[str]:
    """Problems of the pins alone, one line each."""
    problems = [
        f"cluster.nodes.{role}: no such role; the roles are {', '.join(demands)}"
        for role in pins
        if role not in demands
    ]
    sharing = [role for role, items in demands.items() if any(map(gpus.is_share, items))]
    if len({tuple(pins[role]) for role in sharing if role in pins}) > 1:
        problems.append(f"cluster.nodes: {', '.join(sharing)} share GPUs, so they have equal nodes")
    return problems


def _hardest_first(block: Block) -> tuple[bool, float]:
    return block.allowed is None, -max((gpu for _, gpu in block.ranks), default=0.0)


def _choose(block: Block, nodes: Sequence[Node], free: dict[int, list[float]]) -> list[Node | None]:
    """A node for each rank, taken out of `free`; None where there is no room."""
    allowed = [node for node in nodes if block.allowed is None or node.number in block.allowed]
    cpus, whole_gpus = (sum(column) for column in zip(*block.ranks, strict=True))
    whole = [node for node in allowed if _holds(free[node.number], cpus, whole_gpus)][:1]
    chosen: list[Node | None] = []
    for cpu, gpu in block.ranks:
        node = next((n for n in whole or allowed if _holds(free[n.number], cpu, gpu)), None)
        if node is not None:
            free[node.number][0] -= cpu
            free[node.number][1] -= gpu
        chosen.append(node)
    return chosen


def _holds(free: Sequence[float], num_cpus: float, num_gpus: float) -> bool:
    return free[0] + ROUNDING >= num_cpus and free[1] + ROUNDING >= num_gpus


# -- words -----------------------------------------------------------------------------------


def waiting(missing: Sequence[Shortage], nodes: Sequence[Node], num_nodes: int | None) -> str:
    """What a cluster lacks: `waiting for 2 GPUs on 1 more node (actor); has node 0 (...)`.

    `num_nodes` is how many nodes will come, where that is known.
    """
    lacking = max(_nodes_lacking(missing, nodes), (num_nodes or 0) - len(nodes), 0)
    place = f"{lacking} more node{'s'[: lacking != 1]}" if lacking else ""
    need = amount(sum(m.num_cpus for m in missing), sum(m.num_gpus for m in missing))
    roles = ", ".join(dict.fromkeys(role for item in missing for role in item.roles))
    what = " on ".join(filter(None, [need if missing else "", place]))
    has = ", ".join(map(str, nodes)) or "no node"
    return f"waiting for {what}{f' ({roles})' if roles else ''}; has {has}"


def _nodes_lacking(missing: Sequence[Shortage], nodes: Sequence[Node]) -> int:
    """Nodes without which a pin can't be met."""
    highest = max((max(item.allowed) for item in missing if item.allowed), default=-1)
    return highest + 1 - len(nodes)


def amount(num_cpus: float, num_gpus: float) -> str:
    """`8 CPUs and 1 GPU`; what is none is left out."""
    counts = ((num_cpus, "CPU"), (num_gpus, "GPU"))
    parts = [f"{count:g} {name}{'s'[: count != 1]}" for count, name in counts if count > ROUNDING]
    return " and ".join(parts) or "nothing free"


def in_order(found: Sequence[Mapping[str, object]], numbered: str) -> list[Mapping[str, object]]:
    """Ray's nodes that are alive: by the number in a resource `numbered<number>`, then by address.

    A number comes from us, for a cluster whose nodes have an order of their own.
    """
    alive = [node for node in found if node["Alive"]]
    return sorted(alive, key=lambda node: (_number(node, numbered), *_address(node)))


def _number(node: Mapping[str, object], numbered: str) -> int:
    resources: Mapping[str, float] = node["Resources"]  # type: ignore[assignment]
    found = [name.removeprefix(numbered) for name in resources if name.startswith(numbered)]
    return int(found[0]) if found else 0


def _address(node: Mapping[str, object]) -> tuple[list[int | str], str]:
    """10.0.0.9 comes before 10.0.0.10."""
    text = str(node["NodeManagerAddress"])
    octets: list[int | str] = [int(part) for part in text.split(".") if part.isdecimal()]
    return octets or [text], str(node["NodeID"])
