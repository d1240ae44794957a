"""A Ray instance of our own on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from rlpost.cluster import gpus
from rlpost.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from rlpost.cluster.workers import Placement, Worker

SLOW_START = "timed out during startup"  # Ray waits 30 s, less than a busy machine may need


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
        self._shared_gpus = gpus.SharedGpus()

    def start(self) -> None:
        """Raises ClusterError with Ray's reason. A start that is slow is tried again in time."""
        end = time.monotonic() + self.config.start_deadline_s
        on_term = signal.getsignal(signal.SIGTERM)
        while True:
            try:
                self._init_ray()
                break
            except Exception as error:  # Ray raises bare exceptions
                self.shutdown()
                if SLOW_START not in str(error) or time.monotonic() > end:
                    raise ClusterError(f"Ray did not start: {error}") from error
        signal.signal(signal.SIGTERM, on_term)  # Ray takes it, and would exit without a word

    def _init_ray(self) -> None:
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # A short path: Ray's unix sockets lie below it, and those are limited to 107 bytes.
        self._temp_dir = tempfile.mkdtemp(prefix="rlpost-ray-")
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

    def spawn(self, *, role: str, rank: int, placement: Placement) -> Worker:
        """Starts an empty worker process; `await worker.create(...)` fills it."""
        import ray

        from rlpost.cluster.host import Host
        from rlpost.cluster.workers import Worker

        log_path = str(self._log_dir / f"{role}-{rank}.log")
        actor = (
            ray.remote(Host)
            .options(max_concurrency=1000, max_restarts=0, **self._resources(rank, placement))
            .remote(
                env=dict(placement.env), cores=self.config.cores.get(role, []), log_path=log_path
            )
        )
        worker = Worker(role=role, rank=rank, actor=actor, log_path=log_path)
        self._workers.append(worker)
        return worker

    def _resources(self, rank: int, placement: Placement) -> dict[str, Any]:
        """Options of the Ray actor."""
        if gpus.is_share(placement):
            return self._shared_gpus.options(rank, placement.num_gpus)
        return {"num_cpus": placement.num_cpus, "num_gpus": placement.num_gpus}

    def check_fits(self, demands: dict[str, list[Placement]]) -> None:
        """Raises ConfigError before anything starts if the roles need more than there is."""
        if problems := [f"shares of one GPU exceed 1: {roles}" for roles in gpus.overfull(demands)]:
            raise ConfigError(problems)
        num_cpus = sum(item.num_cpus for items in demands.values() for item in items)
        for kind, have, need in (
            ("num_cpus", self.config.num_cpus, num_cpus),
            ("num_gpus", self.config.num_gpus, gpus.num_gpus(demands)),
        ):
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
