"""A Ray instance of our own on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from rlpost.errors import ConfigError

if TYPE_CHECKING:
    from rlpost.cluster.workers import Placement, Worker


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


class LocalCluster:
    """Starts Ray, spawns workers, ends everything it started."""

    Config = LocalClusterConfig

    def __init__(self, config: LocalClusterConfig, *, log_dir: Path) -> None:
        self.config = config
        self._log_dir = log_dir
        self._temp_dir = ""
        self._workers: list[Worker] = []

    def start(self) -> None:
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # A short path: Ray's unix sockets lie below it, and those are limited to 107 bytes.
        self._temp_dir = tempfile.mkdtemp(prefix="rlpost-ray-")
        on_term = signal.getsignal(signal.SIGTERM)
        ray.init(
            address="local",
            num_cpus=self.config.num_cpus,
            num_gpus=self.config.num_gpus,
            object_store_memory=self.config.object_store_bytes,
            include_dashboard=False,
            _node_ip_address=node_address(),
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=self._temp_dir,
            # Workers are few and started on demand; a pool of idle ones would eat the cores.
            _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
        )
        signal.signal(signal.SIGTERM, on_term)  # Ray takes it, and would exit without a word

    def spawn(self, *, role: str, rank: int, placement: Placement) -> Worker:
        """Starts an empty worker process; `await worker.create(...)` fills it."""
        import ray

        from rlpost.cluster.host import Host
        from rlpost.cluster.workers import Worker

        log_path = str(self._log_dir / f"{role}-{rank}.log")
        actor = (
            ray.remote(Host)
            .options(
                num_cpus=placement.num_cpus,
                num_gpus=placement.num_gpus,
                max_concurrency=1000,
                max_restarts=0,
            )
            .remote(
                env=dict(placement.env), cores=self.config.cores.get(role, []), log_path=log_path
            )
        )
        worker = Worker(role=role, rank=rank, actor=actor, log_path=log_path)
        self._workers.append(worker)
        return worker

    def check_fits(self, demands: dict[str, list[Placement]]) -> None:
        """Raises ConfigError before anything starts if the roles need more than there is."""
        placements = [item for items in demands.values() for item in items]
        for kind, have in (("num_cpus", self.config.num_cpus), ("num_gpus", self.config.num_gpus)):
            need = sum(getattr(item, kind) for item in placements)
            if need > have:
                parts = ", ".join(
                    f"{role} {sum(getattr(item, kind) for item in items):g}"
                    for role, items in demands.items()
                )
                raise ConfigError(
                    [f"cluster.{kind} ({have}) is less than the roles need ({need:g}: {parts})"]
                )

    def shutdown(self) -> None:
        """Ends workers and Ray; safe to call twice or after a failed start."""
        import ray

        for worker in self._workers:
            with contextlib.suppress(Exception):
                worker.kill()
        self._workers.clear()
        ray.shutdown()
        shutil.rmtree(self._temp_dir, ignore_errors=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[LocalCluster]:
        try:
            self.start()
            yield self
        finally:
            self.shutdown()


def free_port() -> int:
    """A TCP port that is free now, for a process group's rendezvous."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def node_address() -> str:
    """Address of this one-machine cluster: nothing listens on the network."""
    return "127.0.0.1"
