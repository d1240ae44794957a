"""Joining a Ray cluster that already runs: real `ray start`, one session for the file."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlpost.cluster.address import AddressCluster, AddressClusterConfig
from rlpost.cluster.nodes import waiting
from rlpost.cluster.workers import Placement, Worker
from rlpost.errors import ClusterError

pytestmark = pytest.mark.slow


class Place:
    """What a worker hosts here."""

    def here(self) -> tuple[str, list[str]]:
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]


class RunningRay:
    """`ray start` of one head; `grow` adds a node. Ends by signals to these processes."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._folders: list[tempfile.TemporaryDirectory[str]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._add("--head", f"--port={self.address.split(':')[1]}", "--include-dashboard=false")

    def grow(self) -> None:
        self._add(f"--address={self.address}", "--num-gpus=2")

    def _add(self, *options: str) -> None:
        self._folders.append(tempfile.TemporaryDirectory(prefix="ray-"))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        own = ["--node-ip-address=127.0.0.1", "--num-cpus=2", "--object-store-memory=100000000"]
        temp = [f"--temp-dir={self._folders[-1].name}", "--disable-usage-stats"]
        with Path(self._folders[-1].name, "said.log").open("wb") as said:
            self.processes.append(
                subprocess.Popen(
                    [*command, *options, *own, *temp],
                    stdout=said,
                    stderr=said,
                    env={**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"},
                )
            )

    def end(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(30)
        for folder in self._folders:
            folder.cleanup()


@pytest.fixture(scope="module")
def running() -> Iterator[RunningRay]:
    # Ray's nodes and drivers show each other the token of this user.
    token = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"]
    subprocess.run(token, check=True, capture_output=True)
    os.environ["RAY_AUTH_MODE"] = "token"
    made = RunningRay()
    try:
        wait_for(made.address)
        yield made
    finally:
        made.end()


def wait_for(address: str) -> None:
    """Until the head listens."""
    host, port = address.split(":")
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < end, f"nobody listens at {address}"
            time.sleep(0.2)


def cluster(address: str, folder: Path, **keys: Any) -> AddressCluster:
    settings = {"start_deadline_s": 60.0, "cores": {}, "nodes": {}} | keys
    return AddressCluster(AddressClusterConfig(address=address, **settings), log_dir=folder)


def test_a_cluster_that_does_not_grow_is_given_up_with_what_it_lacks(
    running: RunningRay, tmp_path: Path
) -> None:
    made = cluster(running.address, tmp_path, start_deadline_s=1.0)
    demands = {"actor": [Placement(1, 1, {})] * 2}
    made.check_fits(demands)
    said = r"gave up waiting for 2 CPUs and 2 GPUs \(actor\); has node 0 \([\d.]+: 2 CPUs\)"
    with pytest.raises(ClusterError, match=said), made.running(demands):
        pass


async def test_it_waits_for_room_takes_it_in_order_and_leaves_the_cluster_running(
    running: RunningRay, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpost.cluster.base.SAY_EVERY_S", 0.2)
    demands = {"rollout": [Placement(1, 0, {})], "actor": [Placement(1, 1, {})] * 2}
    made = cluster(running.address, tmp_path)
    grown = threading.Thread(target=running.grow)
    looks = 0

    def grow_after_it_was_said(*arguments: Any) -> str:
        nonlocal looks
        looks += 1
        if looks == 3:
            grown.start()
        return waiting(*arguments)

    monkeypatch.setattr("rlpost.cluster.base.waiting", grow_after_it_was_said)
    with made.running(demands):
        addresses = [node.address for node in made.nodes()]
        workers, places = await started(made, demands)
        pids = [await worker.pid() for worker in workers]
        rendezvous = await workers[1].rendezvous(deadline_s=30.0)
    grown.join()
    assert "waiting for 2 CPUs and 2 GPUs (actor); has node 0 (" in capsys.readouterr().out
    (_, none), (node, first), (other, second) = places
    assert node == other and (none, first, second) == ([], ["0"], ["1"])
    assert rendezvous.address in addresses
    assert all(process.poll() is None for process in running.processes)
    ended(pids)


async def test_shared_gpus_are_taken_rank_by_rank_once_they_are_free_again(
    running: RunningRay, tmp_path: Path
) -> None:
    demands = {"engine": [Placement(1, 0.4, {})] * 2, "actor": [Placement(1, 0.5, {})] * 2}
    made = cluster(running.address, tmp_path)
    with made.running(demands):
        _, places = await started(made, demands)
    assert places[:2] == places[2:] and sorted(gpu for _, (gpu,) in places[:2]) == ["0", "1"]


async def started(made: AddressCluster, demands: Any) -> tuple[list[Worker], list[Any]]:
    """The workers of all roles, and where each is: (node, GPUs)."""
    workers = [
        made.spawn(role=role, rank=rank, placement=placement)
        for role, items in demands.items()
        for rank, placement in enumerate(items)
    ]
    for worker in workers:
        await worker.create(Place, [], {}, deadline_s=60.0)
    return workers, [await worker.call("here", deadline_s=30.0) for worker in workers]


def ended(pids: list[int]) -> None:
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "workers of the run are still there"
        time.sleep(0.1)


def test_an_address_where_nobody_listens_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match=r"nobody listens at.*\(127\.0\.0\.1:1\): "),
        cluster("127.0.0.1:1", tmp_path, start_deadline_s=0.5).running({}),
    ):
        pass
