"""A Ray instance of our own on this machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from rlpost.cluster.base import RayCluster
from rlpost.cluster.leftovers import end_writers_to

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LocalClusterConfig:
    """`num_cpus` are Ray's logical CPUs (a label to count against), not threads.

    `cores` pins the workers of a role to these core numbers; a role not named floats.
    """

    num_cpus: PositiveInt
    num_gpus: NonNegativeInt
    object_store_bytes: PositiveInt
    start_deadline_s: PositiveFloat
    cores: dict[str, list[int]]


class LocalCluster(RayCluster):
    """Starts Ray, spawns workers, ends everything it started.

    Ray listens at the machine's own address, and asks who connects for a token of its own.
    """

    Config = LocalClusterConfig
    num_nodes = 1

    def __init__(self, config: LocalClusterConfig, *, log_dir: Path) -> None:
        super().__init__(config, log_dir=log_dir)
        self._ray = OwnRay()

    def connect(self) -> None:
        self._ray.start(
            address=LOOPBACK,
            num_cpus=self.config.num_cpus,
            num_gpus=self.config.num_gpus,
            object_store_memory=self.config.object_store_bytes,
        )

    def capacity(self) -> Mapping[str, tuple[float, str]]:
        return {
            kind: (have, f"cluster.{kind} ({have})")
            for kind, have in (
                ("num_cpus", self.config.num_cpus),
                ("num_gpus", self.config.num_gpus),
            )
        }

    def shutdown(self) -> None:
        super().shutdown()
        self._ray.clean()


class OwnRay:
    """A Ray head inside this process, with a folder that goes when it goes."""

    def __init__(self) -> None:
        self._temp_dir = ""

    def start(self, *, address: str, **options: Any) -> None:
        import ray

        # A short path: Ray's unix sockets lie below it, and those are limited to 107 bytes.
        self._temp_dir = tempfile.mkdtemp(prefix="rlpost-ray-")
        ray.init(
            address="local",
            include_dashboard=False,
            _node_ip_address=address,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=self._temp_dir,
            # Workers are few and started on demand; a pool of idle ones would eat the cores.
            _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
            **options,
        )

    def clean(self) -> None:
        """After Ray has ended: what it left goes, too."""
        if self._temp_dir:
            end_writers_to(self._temp_dir)
            shutil.rmtree(self._temp_dir, ignore_errors=True)
