"""Whether the roles' CPUs and GPUs are there, and the smallest changes that would make them fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rlpost.cluster import gpus
from rlpost.cluster.nodes import Demands
from rlpost.config import RunConfig
from rlpost.errors import ConfigError
from rlpost.plan.placement import placements
from rlpost.plan.variants import either, fewer_workers, first_of_each_key

KINDS = ("num_cpus", "num_gpus")


def need(demands: Demands, kind: str) -> float:
    if kind == "num_gpus":
        return gpus.num_gpus(demands)
    return sum(item.num_cpus for items in demands.values() for item in items)


def resource_problems(config: RunConfig, cluster: Any) -> list[str]:
    """More CPUs or GPUs than there are in all; else roles that no node has room for."""
    demands = placements(config)
    short = [
        short_of(config, cluster, kind, have, keys)
        for kind, (have, keys) in cluster.capacity().items()
        if need(demands, kind) > have
    ]
    if short:
        return short
    try:
        cluster.check_fits(demands)
    except ConfigError as error:
        return list(error.problems)
    return []


def short_of(config: RunConfig, cluster: Any, kind: str, have: float, keys: str) -> str:
    """`cluster.num_cpus (8) is less than the roles need (10: ...); set cluster.num_cpus=10 or`"""
    demands = placements(config)
    needed = need(demands, kind)
    parts = {role: need({role: items}, kind) for role, items in demands.items()}
    shown = ", ".join(f"{role} {count:g}" for role, count in parts.items() if count)
    ways = either([*more_of(cluster, kind, have, needed), *less_needed(config, kind, have)])
    advice = f"; set {ways}" if ways else ""
    return f"{keys} is less than the roles need ({needed:g}: {shown}){advice}"


def more_of(cluster: Any, kind: str, have: float, needed: float) -> Iterator[str]:
    if hasattr(cluster.config, kind):
        yield f"cluster.{kind}={math.ceil(needed)}"
    elif have and hasattr(cluster.config, "num_nodes"):
        nodes = cluster.config.num_nodes
        yield f"cluster.num_nodes={math.ceil(needed * nodes / have)}"


def less_needed(config: RunConfig, kind: str, have: float) -> Iterator[str]:
    """Of each key, the change nearest to what was asked that is enough by itself."""
    yield from first_of_each_key(
        text for text, made in fewer_workers(config) if need(placements(made), kind) <= have
    )
