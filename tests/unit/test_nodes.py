"""Which node each rank goes to, and what is said while nodes are missing."""

from __future__ import annotations

from typing import Any

import pytest

from rlpost.cluster.local import LocalCluster, LocalClusterConfig
from rlpost.cluster.nodes import Node, assign, in_order, waiting
from rlpost.cluster.slurm import SlurmCluster
from rlpost.cluster.workers import Placement
from rlpost.config import build, load
from rlpost.errors import ConfigError
from rlpost.overrides import compose_node

TWO = [Node(0, "10.0.0.9", 8, 4), Node(1, "10.0.0.10", 8, 4)]


def ranks(count: int, num_gpus: float = 1, num_cpus: float = 1) -> list[Placement]:
    return [Placement(num_cpus, num_gpus, {})] * count


def numbers(demands: Any, nodes: Any = TWO, pins: Any = None) -> dict[str, list[int]]:
    places, missing = assign(demands, nodes, pins or {})
    assert not missing
    return {role: [node.number for node in found] for role, found in places.items()}


def test_a_role_that_fits_on_one_node_is_put_there() -> None:
    demands = {"rollout": ranks(1, 0), "engine": ranks(3), "actor": ranks(4)}
    assert numbers(demands) == {"rollout": [0], "engine": [0] * 3, "actor": [1] * 4}


def test_a_larger_role_fills_the_nodes_in_order() -> None:
    assert numbers({"engine": ranks(1), "actor": ranks(6)}) == {
        "engine": [0],
        "actor": [0] * 3 + [1] * 3,
    }


def test_ranks_that_take_many_gpus_come_first() -> None:
    assert numbers({"actor": ranks(4), "engine": ranks(1, 4)}) == {"actor": [1] * 4, "engine": [0]}


def test_a_pinned_role_goes_to_its_node_before_the_others_take_it() -> None:
    pins = {"engine": [1], "actor": [0]}
    assert numbers({"engine": ranks(2, 0), "actor": ranks(2, 0)}, pins=pins) == {
        "engine": [1, 1],
        "actor": [0, 0],
    }


def test_roles_that_share_gpus_are_on_the_same_nodes_rank_by_rank() -> None:
    places = numbers({"engine": ranks(2, 0.5), "actor": ranks(6, 0.5)})
    assert places["actor"] == [0] * 4 + [1] * 2
    assert places["engine"] == places["actor"][:2]


def test_the_ranks_without_room_are_what_is_missing() -> None:
    _, missing = assign({"actor": ranks(10)}, TWO, {})
    assert len(missing) == 2
    assert waiting(missing, TWO[:1], 2) == (
        "waiting for 2 CPUs and 2 GPUs on 1 more node (actor); "
        "has node 0 (10.0.0.9: 8 CPUs and 4 GPUs)"
    )


def test_a_pin_to_a_node_that_is_not_there_waits_for_it() -> None:
    _, missing = assign({"engine": ranks(1, 0)}, TWO[:1], {"engine": [2]})
    assert "waiting for 1 CPU on 2 more nodes (engine)" in waiting(missing, TWO[:1], None)
    assert waiting([], [], 1) == "waiting for 1 more node; has no node"


def ray_node(address: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "NodeID": "x", "Alive": alive, "Resources": resources}


def test_nodes_are_ordered_by_our_number_else_by_address() -> None:
    found = [ray_node("10.0.0.10"), ray_node("10.0.0.9"), ray_node("10.0.0.1", alive=False)]
    assert [node["NodeManagerAddress"] for node in in_order(found, "n_")] == [
        "10.0.0.9",
        "10.0.0.10",
    ]
    found = [ray_node("10.0.0.1", n_1=1), ray_node("10.0.0.2", n_0=1)]
    assert [node["NodeManagerAddress"] for node in in_order(found, "n_")] == [
        "10.0.0.2",
        "10.0.0.1",
    ]


def slurm_cluster(*overrides: str) -> SlurmCluster:
    keys = ["cluster=slurm", "cluster.num_nodes=2", "cluster.num_cpus_per_node=4", *overrides]
    config = load(compose_node(keys))
    return build(config.cluster, log_dir=None)


@pytest.mark.parametrize(
    ("overrides", "demands", "said"),
    [
        ([], {"actor": ranks(9, 0)}, r"_per_node \(4\) x cluster.num_nodes \(2\) is less.*9"),
        ([], {"actor": ranks(2, 0, 3), "engine": ranks(2, 0)}, None),
        ([], {"actor": ranks(2, 0, 3), "engine": ranks(1, 0, 2)}, "engine: no room for all.*any"),
        (["+cluster.nodes.actor=[1]"], {"actor": ranks(5, 0)}, r"no room.*nodes\.actor \(\[1\]\)"),
        (["+cluster.nodes.actr=[1]"], {"actor": ranks(1, 0)}, r"nodes\.actr: no such role"),
    ],
)
def test_what_can_not_be_placed_is_refused_before_the_start(
    overrides: list[str], demands: Any, said: str | None
) -> None:
    cluster = slurm_cluster(*overrides)
    if said is None:
        cluster.check_fits(demands)
        return
    with pytest.raises(ConfigError, match=said):
        cluster.check_fits(demands)


@pytest.mark.parametrize("nodes", ["[2]", "[]"])
def test_a_pin_names_nodes_of_the_job(nodes: str) -> None:
    with pytest.raises(ConfigError, match=r"must name nodes from 0 to 1"):
        slurm_cluster(f"+cluster.nodes.actor={nodes}")


def test_roles_that_need_more_than_there_is_are_refused(tmp_path: Any) -> None:
    config = LocalClusterConfig(
        num_cpus=2, num_gpus=0, object_store_bytes=1, start_deadline_s=1.0, cores={}
    )
    demand = {"actor": ranks(1, 0, 2), "engine": ranks(1, 0)}
    with pytest.raises(ConfigError, match=r"num_cpus \(2\).*need \(3: actor 2, engine 1\)"):
        LocalCluster(config, log_dir=tmp_path).check_fits(demand)


@pytest.mark.parametrize(
    ("actor", "num_gpus", "said"),
    [
        (0.5, 1, r"num_gpus \(1\) is less than the roles need \(2: actor 0\.5, engine 1\)"),
        (0.6, 2, r"shares of one GPU exceed 1: actor 0\.6 \+ engine 0\.5"),
    ],
)
def test_shares_are_counted_by_gpu(tmp_path: Any, actor: float, num_gpus: int, said: str) -> None:
    config = LocalClusterConfig(
        num_cpus=8, num_gpus=num_gpus, object_store_bytes=1, start_deadline_s=1.0, cores={}
    )
    demand = {"actor": ranks(1, actor), "engine": ranks(2, 0.5)}
    with pytest.raises(ConfigError, match=said):
        LocalCluster(config, log_dir=tmp_path).check_fits(demand)
