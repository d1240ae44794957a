"""A Ray cluster of our own over the nodes of a Slurm job."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rlpost.cluster.base import NUMBERED, RayCluster
from rlpost.cluster.leftovers import end_writers_to
from rlpost.cluster.local import OwnRay
from rlpost.cluster.meeting import Guest, Meeting, joined
from rlpost.cluster.nodes import Node, Pins
from rlpost.cluster.sbatch import script
from rlpost.cluster.slurm_job import SlurmTask
from rlpost.errors import ClusterError

LOOK_EVERY_S = 1.0
STOP_TIMEOUT_S = 10.0
CLOSING_S = 300.0  # of the first task after it has left Ray: its trackers may take their time


@dataclass(frozen=True)
class SlurmClusterConfig:
    """What is asked of Slurm, and what Ray then counts: `num_cpus_per_node` and so on.

    `cores` and `nodes` tie roles to core numbers and to nodes (from 0, in Slurm's order); a role
    not named goes anywhere.
    """

    num_nodes: PositiveInt
    num_cpus_per_node: PositiveInt
    num_gpus_per_node: NonNegativeInt
    object_store_bytes: PositiveInt
    start_deadline_s: PositiveFloat
    cores: dict[str, list[int]]
    nodes: dict[str, list[NonNegativeInt]]
    time_limit_min: PositiveInt
    signal_delay_s: PositiveInt
    sbatch: dict[str, str | int | bool]
    run_folder: Annotated[str, Field(min_length=1)]
    render: bool

    def __post_init__(self) -> None:
        for role, nodes in self.nodes.items():
            if not nodes or max(nodes) >= self.num_nodes:
                raise ValueError(
                    f"nodes.{role} ({nodes}) must name nodes from 0 to {self.num_nodes - 1}, as "
                    f"cluster.num_nodes is {self.num_nodes}"
                )
        if self.signal_delay_s >= self.time_limit_min * 60:
            raise ValueError(
                f"signal_delay_s ({self.signal_delay_s}) must be less than time_limit_min "
                f"({self.time_limit_min}), in which the run has to do something first"
            )


class SlurmCluster(RayCluster):
    """Task 0 of the job drives the run and holds Ray's head; the others lend their nodes."""

    Config = SlurmClusterConfig

    def __init__(self, config: SlurmClusterConfig, *, log_dir: Path) -> None:
        super().__init__(config, log_dir=log_dir)
        self.num_nodes = config.num_nodes
        self._ray = OwnRay()
        self._meeting: Meeting | None = None

    @cached_property
    def task(self) -> SlurmTask:
        """Raises ClusterError where there is no job, or one of another shape."""
        task = SlurmTask.of(os.environ)
        task.check(self.config.num_nodes)
        return task

    # -- before the start --------------------------------------------------------------------

    @property
    def pins(self) -> Pins:
        pins: Pins = self.config.nodes
        return pins

    def capacity(self) -> Mapping[str, tuple[float, str]]:
        config = self.config
        return {
            kind: (
                each * config.num_nodes,
                f"cluster.{kind}_per_node ({each}) x cluster.num_nodes ({config.num_nodes})",
            )
            for kind, each in (
                ("num_cpus", config.num_cpus_per_node),
                ("num_gpus", config.num_gpus_per_node),
            )
        }

    def expected(self) -> list[Node]:
        config = self.config
        return [
            Node(number, "Slurm", config.num_cpus_per_node, config.num_gpus_per_node)
            for number in range(config.num_nodes)
        ]

    @property
    def only_renders(self) -> bool:
        only: bool = self.config.render
        return only

    def render(self, *, name: str, run_dir: Path, command: Sequence[str]) -> Path:
        path = run_dir.absolute() / "run.sbatch"
        log = path.with_name("%j.out")
        text = script(self.config, name=name, log=log, folder=Path.cwd(), command=command)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    # -- the task that leads -----------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return self.task.leads

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        # Ray asks every node and driver for it. One for the process, as Ray reads it once.
        secret = os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        self._meeting = Meeting(self._meeting_file, self.task.own_address(), secret=secret)
        try:
            self._meeting.open()
            yield
        finally:
            self._meeting.close()

    def connect(self) -> None:
        import ray

        assert self._meeting is not None, "connect() outside of leading()"
        self._ray.start(address=self.task.own_address(), **self._node_options())
        self._meeting.announce(ray.get_runtime_context().gcs_address)

    def shutdown(self) -> None:
        super().shutdown()
        self._ray.clean()

    def requeue(self) -> None:
        print(f"requeueing job {self.task.job_id}", flush=True)
        self.task.requeue()

    def _node_options(self) -> dict[str, object]:
        """Of one node, as ray.init calls them."""
        return {
            "num_cpus": self.config.num_cpus_per_node,
            "num_gpus": self.config.num_gpus_per_node,
            "object_store_memory": self.config.object_store_bytes,
            "resources": {f"{NUMBERED}{self.task.number}": 1},
        }

    @property
    def _meeting_file(self) -> Path:
        return self._log_dir / f"job-{self.task.name}.json"

    # -- the others --------------------------------------------------------------------------

    def lend(self) -> None:
        """Joins Ray with this node until task 0 has ended. Raises ClusterError."""
        signal.signal(signal.SIGTERM, lambda *_: None)  # task 0 gets it too, and decides
        with joined(self._meeting_file, self.config.start_deadline_s) as guest:
            address = guest.ray_address()
            if address is not None:
                self._join(address, guest)

    def _join(self, address: str, guest: Guest) -> None:
        temp_dir = tempfile.mkdtemp(prefix="rlpost-ray-")
        log = self._log_dir / f"node-{self.task.number}.log"
        try:
            with log.open("a") as output:
                process = subprocess.Popen(
                    self._ray_start(address, temp_dir),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._ray_environment(guest.secret),
                )
            try:
                while not guest.leader_has_ended(LOOK_EVERY_S):
                    if process.poll() is not None and not guest.leader_has_ended(CLOSING_S):
                        raise ClusterError(f"Ray ended on this node; its log is {log}")
            finally:
                _end(process)
        finally:
            end_writers_to(temp_dir)
            shutil.rmtree(temp_dir, ignore_errors=True)

    @staticmethod
    def _ray_environment(secret: str) -> dict[str, str]:
        own = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # the run has ended: nothing to wait for
        }
        return {**own, **os.environ, "RAY_AUTH_TOKEN": secret}

    def _ray_start(self, address: str, temp_dir: str) -> list[str]:
        options = self._node_options()
        named = {
            "address": address,
            "node-ip-address": self.task.own_address(),
            "num-cpus": options["num_cpus"],
            "num-gpus": options["num_gpus"],
            "object-store-memory": options["object_store_memory"],
            "resources": json.dumps(options["resources"]),
            "temp-dir": temp_dir,
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        return [*command, *(f"--{name}={value}" for name, value in named.items())]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Most of Ray's processes on the node end with this one."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
