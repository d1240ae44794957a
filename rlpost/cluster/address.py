"""A Ray cluster that already runs: joined, used and left as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from rlpost.cluster.base import RayCluster
from rlpost.cluster.nodes import Pins


@dataclass(frozen=True)
class AddressClusterConfig:
    """`address` is that of the cluster's head, host:port; `nodes` counts its nodes from 0.

    `cores` and `nodes` tie roles to core numbers and to nodes; a role not named goes anywhere.
    """

    address: Annotated[str, Field(pattern=r"^[^\s/:]+:\d+$")]
    start_deadline_s: PositiveFloat
    cores: dict[str, list[int]]
    nodes: dict[str, list[NonNegativeInt]]


class AddressCluster(RayCluster):
    """Joins; waits until there is room for the roles; at the end only its own workers end."""

    Config = AddressClusterConfig

    @property
    def pins(self) -> Pins:
        pins: Pins = self.config.nodes
        return pins

    def connect(self) -> None:
        import ray

        ray.init(address=self.config.address, log_to_driver=False, logging_level="ERROR")
