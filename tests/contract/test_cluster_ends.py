"""A Ray of our own over two nodes ends with all its processes: real `ray start`, once.

In a process of its own, as Ray reads the token with which a cluster is joined once in a process.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from rlpost.cluster.leftovers import writers_to
from rlpost.cluster.meeting import joined
from rlpost.cluster.slurm import SlurmCluster
from rlpost.cluster.slurm_job import SlurmTask
from rlpost.config import build, load
from rlpost.overrides import compose_node

pytestmark = pytest.mark.slow

OPTIONS = ("cluster=slurm", "cluster.num_cpus_per_node=1", "cluster.object_store_bytes=100000000")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of temporary files. Ray's unix sockets lie below it, so its path is short."""
    made = Path(tempfile.mkdtemp(prefix="ends-"))
    yield made
    shutil.rmtree(made)


def node(number: int, log_dir: Path) -> SlurmCluster:
    """That of one task; the nodes of the test are both on this machine."""
    cluster: SlurmCluster = build(load(compose_node(list(OPTIONS))).cluster, log_dir=log_dir)
    shape = {"num_restarts": 0, "num_tasks": 1, "num_nodes": 1, "node_names": "n1"}
    cluster.__dict__["task"] = SlurmTask("7", "0", number=number, **shape)  # type: ignore[arg-type]
    return cluster


def raylet(folder: Path) -> int:
    """That of the Ray whose folder it is."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in writers_to(str(folder))}
    (found,) = [
        pid for pid, words in commands.items() if words.split(b"\0")[0].endswith(b"/raylet")
    ]
    return found


def test_nothing_is_left_of_two_nodes_of_which_one_hangs(folder: Path, tmp_path: Path) -> None:
    """A raylet that does not answer in time is killed, and leaves its agents behind."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        process.submit(two_nodes_of_which_one_hangs, folder, tmp_path).result(150)


def two_nodes_of_which_one_hangs(folder: Path, log_dir: Path) -> None:
    tempfile.tempdir = str(folder)
    leader, lender = node(0, log_dir), node(1, log_dir)

    def lend() -> None:
        with joined(log_dir / "job-7.0.0.json", 30.0) as guest:
            lender._join(guest.ray_address() or "", guest)

    thread = threading.Thread(target=lend, daemon=True)
    with leader.leading():
        with leader.running():
            (own,) = folder.glob("rlpost-ray-*")
            thread.start()
            end = time.monotonic() + 60
            while len(leader.nodes()) < 2:
                assert time.monotonic() < end, (log_dir / "node-1.log").read_text()
                time.sleep(0.2)
            (lent,) = set(folder.glob("rlpost-ray-*")) - {own}
            os.kill(raylet(lent), signal.SIGSTOP)
        assert list(writers_to(str(own))) == []
        assert list(writers_to(str(lent))) != []
    thread.join(30)
    assert not thread.is_alive()
    assert list(writers_to(str(folder))) == [] and not list(folder.glob("rlpost-ray-*"))
