"""Worker processes: real Ray, one session for the file."""

import asyncio
import concurrent.futures
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from rlpost.cluster import store
from rlpost.cluster.local import LocalCluster, LocalClusterConfig
from rlpost.cluster.workers import Placement, Worker, WorkerGroup
from rlpost.errors import DeadlineError, TrainerError, WorkerDiedError

pytestmark = pytest.mark.slow


class Thing:
    """What a worker hosts here."""

    def __init__(self, number: int) -> None:
        self.number = number

    def add(self, other: int) -> int:
        return self.number + other

    def fail_on(self, number: int) -> int:
        if number == self.number:
            raise TrainerError(f"rank {number} failed")
        return self.number

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def total(self, ref: object) -> float:
        return float(store.fetch(ref).sum())

    def environment(self, name: str) -> str:
        return os.environ[name]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    # Workers unpickle `Thing` by name, so this folder must be on their path.
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    config = LocalClusterConfig(
        num_cpus=8, num_gpus=2, object_store_bytes=100_000_000, start_deadline_s=60.0, cores={}
    )
    with LocalCluster(config, log_dir=tmp_path_factory.mktemp("logs")).running() as made:
        yield made
    del os.environ["PYTHONPATH"]


async def things(cluster, count: int) -> WorkerGroup:
    placement = Placement(num_cpus=1, num_gpus=0, env={"RLPOST_TEST": "yes"})
    workers = [cluster.spawn(role="thing", rank=rank, placement=placement) for rank in range(count)]
    for rank, worker in enumerate(workers):
        await worker.create(Thing, [rank], {}, deadline_s=60.0)
    return WorkerGroup("thing", workers)


async def test_calls_reach_all_ranks_and_answer_in_rank_order(cluster):
    group = await things(cluster, 2)
    assert await group.call("add", 3, deadline_s=30.0) == [3, 4]
    assert await group.call("environment", "RLPOST_TEST", deadline_s=30.0) == ["yes", "yes"]
    group.kill()


async def test_the_exception_of_any_rank_fails_the_call_as_itself(cluster):
    group = await things(cluster, 2)
    for rank in (0, 1):
        with pytest.raises(TrainerError, match=f"rank {rank} failed"):
            await group.call("fail_on", rank, deadline_s=30.0)
    group.kill()


async def test_a_passed_deadline_names_who_was_waited_for(cluster):
    group = await things(cluster, 1)
    with pytest.raises(DeadlineError, match=r"thing\[0\] did not answer sleep\(\) within 0\.2 s"):
        await group.call("sleep", 30.0, deadline_s=0.2)
    group.kill()


async def test_a_killed_worker_fails_the_call_at_once_and_is_named(cluster):
    group = await things(cluster, 1)
    pid = await group.workers[0].pid()
    waiting = asyncio.ensure_future(group.call("sleep", 60.0, deadline_s=60.0))
    await asyncio.sleep(0.2)
    started = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"thing\[0\] died during sleep"):
        await waiting
    assert time.monotonic() - started < 20


async def test_a_worker_that_ray_ends_for_memory_says_so():
    future = concurrent.futures.Future()
    future.set_exception(ray.exceptions.OutOfMemoryError("top 10 memory users"))
    answer = SimpleNamespace(future=lambda: future)
    actor = SimpleNamespace(call=SimpleNamespace(remote=lambda *_: answer))
    worker = Worker(role="thing", rank=0, actor=actor, log_path="thing-0.log")
    with pytest.raises(WorkerDiedError, match=r"thing\[0\] was ended by Ray during train\(\), as"):
        await worker.call("train", deadline_s=1.0)


async def test_a_reference_moves_the_place_of_the_data_not_the_data(cluster):
    group = await things(cluster, 1)
    ref = store.put(np.ones(1000))
    assert await group.call("total", ref, deadline_s=30.0) == [1000.0]
    group.kill()


async def test_roles_share_gpus_rank_by_rank(cluster):
    """Ranks of one role never share: NCCL would refuse."""
    visible = {}
    groups = []
    for role, share in (("engine", 0.4), ("actor", 0.5)):
        placement = Placement(num_cpus=1, num_gpus=share, env={})
        workers = [cluster.spawn(role=role, rank=rank, placement=placement) for rank in range(2)]
        for worker in workers:
            await worker.create(Thing, [0], {}, deadline_s=60.0)
        groups.append(WorkerGroup(role, workers))
        visible[role] = await groups[-1].call(
            "environment", "CUDA_VISIBLE_DEVICES", deadline_s=30.0
        )
    assert visible["actor"] == visible["engine"] and sorted(visible["actor"]) == ["0", "1"]
    for group in groups:
        group.kill()
