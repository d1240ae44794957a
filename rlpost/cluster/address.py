"""A Ray cluster that already runs: joined, used and left as it is."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from rlpost.cluster.base import LOOK_EVERY_S, RayCluster
from rlpost.cluster.nodes import Pins
from rlpost.errors import ClusterError

CONNECT_TIMEOUT_S = 5.0


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

        self._reach()  # Ray itself would try for minutes, and end with a stack of its own
        ray.init(address=self.config.address, log_to_driver=False, logging_level="ERROR")

    def _reach(self) -> None:
        """Raises ClusterError when nobody listens at the address in time."""
        host, port = self.config.address.split(":")
        end = time.monotonic() + self.config.start_deadline_s
        while True:
            try:
                socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise ClusterError(
                        f"nobody listens at cluster.address ({self.config.address}): {error}; "
                        "it is what `ray start --head` printed on the head"
                    ) from error
                time.sleep(LOOK_EVERY_S)
