"""What every cluster does once Ray is there: it fits roles in, spawns workers and ends them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.cluster import gpus
from rlpost.cluster.nodes import Demands, Node, Pins, assign, in_order, split_pins, waiting
from rlpost.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from rlpost.cluster.workers import Placement, Worker

SLOW_START = "timed out during startup"  # Ray waits 30 s, less than a busy machine may need
NUMBERED = "rlpost_node_"  # resource of a node whose number we know
LOOK_EVERY_S = 0.5
SAY_EVERY_S = 5.0


class RayCluster(ABC):
    """A cluster class connects in `connect`, and says what it will have before the start."""

    num_nodes: int | None = None  # how many will come, where that is known

    def __init__(self, config: Any, *, log_dir: Path) -> None:
        self.config = config
        self._log_dir = log_dir
        self._workers: list[Worker] = []
        self._shared_gpus = gpus.SharedGpus()
        self._places: dict[str, list[Node]] = {}

    # -- what differs ------------------------------------------------------------------------

    @abstractmethod
    def connect(self) -> None:
        """Starts Ray, or joins it. Raises ClusterError."""

    def capacity(self) -> Mapping[str, tuple[float, str]]:
        """For num_cpus and num_gpus: what all nodes have, and the keys that say so."""
        return {}

    def expected(self) -> list[Node]:
        """The nodes that there will be; none where that is not known before the start."""
        return []

    @property
    def pins(self) -> Pins:
        """Role -> numbers of the nodes that it may take; a role that is not named takes any."""
        return {}

    @property
    def leads(self) -> bool:
        """Whether this process drives the run; the others of a job lend their node."""
        return True

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Around all that the leading process does for a run."""
        yield

    @property
    def only_renders(self) -> bool:
        """Whether the run's script is asked for, and not the run."""
        return False

    def render(self, *, name: str, run_dir: Path, command: Sequence[str]) -> Path:
        """Writes the script that starts `command` as a job. Its path."""
        raise AssertionError("only a cluster with a scheduler has scripts")

    def lend(self) -> None:
        """What a process does that does not lead: returns when the leading one has ended."""
        raise AssertionError("only a process of a job of many lends its node")

    def requeue(self) -> None:
        """Lets the scheduler start the run's job again, where there is one."""
        return

    # -- before the start --------------------------------------------------------------------

    def check_fits(self, demands: Demands) -> None:
        """Raises ConfigError before anything starts if the roles need more than there is."""
        problems = [f"shares of one GPU exceed 1: {roles}" for roles in gpus.overfull(demands)]
        problems += split_pins(demands, self.pins)
        if problems or (problems := list(self._too_little(demands))):
            raise ConfigError(problems)

    def _too_little(self, demands: Demands) -> Iterator[str]:
        needs = {
            "num_cpus": sum(item.num_cpus for items in demands.values() for item in items),
            "num_gpus": gpus.num_gpus(demands),
        }
        short = False
        for kind, (have, keys) in self.capacity().items():
            if needs[kind] > have:
                parts = ", ".join(
                    f"{role} {sum(getattr(item, kind) for item in items):g}"
                    for role, items in demands.items()
                )
                yield f"{keys} is less than the roles need ({needs[kind]:g}: {parts})"
                short = True
        if self.expected() and not short:
            yield from self._no_room(demands)

    def _no_room(self, demands: Demands) -> Iterator[str]:
        _, missing = assign(demands, self.expected(), self.pins)
        for role in dict.fromkeys(role for item in missing for role in item.roles):
            pinned = self.pins.get(role)
            where = f"on cluster.nodes.{role} ({pinned})" if pinned is not None else "on any node"
            has = ", ".join(map(str, self.expected()))
            yield f"{role}: no room for all its workers {where} beside the other roles; has {has}"

    # -- the start ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, demands: Demands | None = None) -> Iterator[RayCluster]:
        """Ray is there, with room for `demands`; what was started ends at the end."""
        try:
            self._start()
            if demands is not None:
                self._places = self._wait_for_room(demands)
                self._record()
            yield self
        finally:
            self.shutdown()

    def _start(self) -> None:
        """Raises ClusterError with Ray's reason. A start that is slow is tried again in time."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        end = time.monotonic() + self.config.start_deadline_s
        on_term = signal.getsignal(signal.SIGTERM)
        while True:
            try:
                self.connect()
                break
            except Exception as error:  # Ray raises bare exceptions
                self.shutdown()
                if SLOW_START not in str(error) or time.monotonic() > end:
                    raise ClusterError(f"Ray did not start: {error}") from error
        signal.signal(signal.SIGTERM, on_term)  # Ray takes it, and would exit without a word

    def _wait_for_room(self, demands: Demands) -> dict[str, list[Node]]:
        """Raises ClusterError when the nodes do not come in time; says meanwhile what lacks."""
        end = time.monotonic() + self.config.start_deadline_s
        say_at = time.monotonic() + SAY_EVERY_S
        while True:
            nodes = self.nodes()
            places, missing = assign(demands, nodes, self.pins)
            if not missing and len(nodes) >= (self.num_nodes or 0):
                return places
            message = waiting(missing, nodes, self.num_nodes)
            if time.monotonic() > end:
                raise ClusterError(f"gave up {message}; cluster.start_deadline_s has passed")
            if time.monotonic() > say_at:
                print(message, flush=True)
                say_at += SAY_EVERY_S
            time.sleep(LOOK_EVERY_S)

    def _record(self) -> None:
        """Which node each worker is on, by role and rank, for people."""
        nodes = {node.number: node.address for places in self._places.values() for node in places}
        roles = {role: [node.number for node in places] for role, places in self._places.items()}
        self._log_dir.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"nodes": nodes, "roles": roles}, indent=2)
        (self._log_dir / "placement.json").write_text(text + "\n")

    def nodes(self) -> list[Node]:
        """The living nodes, and what is free on each now."""
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [
            Node(
                number,
                str(node["NodeManagerAddress"]),
                num_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
                num_gpus=free.get(node["NodeID"], {}).get("GPU", 0.0),
                id=str(node["NodeID"]),
            )
            for number, node in enumerate(in_order(ray.nodes(), NUMBERED))
        ]

    # -- workers -----------------------------------------------------------------------------

    def spawn(self, *, role: str, rank: int, placement: Placement) -> Worker:
        """Starts an empty worker process; `await worker.create(...)` fills it."""
        import ray

        from rlpost.cluster.host import Host
        from rlpost.cluster.workers import Worker

        log_path = str(self._log_dir.absolute() / f"{role}-{rank}.log")
        actor = (
            ray.remote(Host)
            .options(max_concurrency=1000, max_restarts=0, **self._options(role, rank, placement))
            .remote(
                env=dict(placement.env),
                cores=self.config.cores.get(role, []),
                log_path=log_path,
                folder=os.getcwd(),
                import_paths=list(sys.path),
            )
        )
        worker = Worker(role=role, rank=rank, actor=actor, log_path=log_path)
        self._workers.append(worker)
        if placement.num_gpus >= 1:
            self._wait_until_it_runs(worker, actor)
        return worker

    def _wait_until_it_runs(self, worker: Worker, actor: Any) -> None:
        """Ray hands devices out in the order of starts, and ranks have the order of devices."""
        import ray

        deadline_s = self.config.start_deadline_s
        try:
            ray.get(actor.pid.remote(), timeout=deadline_s)
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"{worker!r} did not start within cluster.start_deadline_s ({deadline_s:g}); "
                f"its log is {worker.log_path}"
            ) from error

    def _options(self, role: str, rank: int, placement: Placement) -> dict[str, Any]:
        """Of the Ray actor. A role whose node is not fixed goes where Ray likes."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self._places[role][rank] if role in self._places else None
        if gpus.is_share(placement):
            on_node = None if node is None else node.id
            return self._shared_gpus.options(rank, placement.num_gpus, on_node)
        options = {"num_cpus": placement.num_cpus, "num_gpus": placement.num_gpus}
        if node is None:
            return options
        return options | {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, False)}

    def shutdown(self) -> None:
        """Ends the workers and leaves Ray; safe to call twice or after a failed start."""
        import ray

        for worker in self._workers:
            with contextlib.suppress(Exception):
                worker.kill()
        self._workers.clear()
        ray.shutdown()
