"""Memory as the system says it, in words, and planned against measured."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from rlpost.loops.memory_report import MemoryReport
from rlpost.memory import MIB, WorkerMemory, family_memory, process_memory, size
from rlpost.tracking.console import memory_line


def test_sizes_are_said_in_units() -> None:
    assert [size(n) for n in (12, 2048, 48 * MIB, 3 << 29, 24 << 30)] == [
        "12 B",
        "2.0 KiB",
        "48 MiB",
        "1.5 GiB",
        "24 GiB",
    ]


def test_memory_of_a_process_and_of_those_below_it() -> None:
    alone = process_memory()
    assert min(alone.values()) > 10 * MIB
    script = "x = bytearray(64 << 20); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        family = family_memory()
        child.communicate(b"\n")
    assert all(family[name] - alone[name] > 60 * MIB for name in ("rss_bytes", "pss_bytes"))


class Reading(SimpleNamespace):
    """A worker that says what it takes."""

    async def call(self, method: str, *, deadline_s: float) -> dict[str, float]:
        assert method == "memory"
        return dict(self.memory)


async def test_planned_and_measured_memory_are_summed_over_ranks() -> None:
    reading = {"rss_bytes": 90.0, "rss_peak_bytes": 100.0, "pss_bytes": 50.0}
    rank = {**reading, "weights_bytes": 4.0, "gradients_bytes": 4.0, "optimizer_bytes": 8.0}
    planned = WorkerMemory({"weights": 5, "optimizer": 9, "logits": 1}, {"process": 40}, False)
    workers: Any = {
        "actor": [Reading(memory=rank)] * 2,
        "engine": [Reading(memory=reading)],
        "prm": [],
    }
    metrics = await MemoryReport(
        {"actor": (planned, planned)}, workers, on_gpu=frozenset()
    ).measure()
    assert metrics == {
        "memory/actor/planned_bytes": 110.0,
        "memory/actor/measured_bytes": 120.0,  # 50 of its own, and 10 more at the peak
        "memory/actor/planned_held_bytes": 28.0,
        "memory/actor/measured_held_bytes": 32.0,
        "memory/engine/measured_bytes": 60.0,
    }
    assert memory_line(metrics) == (
        "memory, measured / planned:  actor 120 B / 110 B  engine 60 B / ?"
    )
    assert memory_line({"train/loss": 1.0}) == ""


async def test_an_engine_on_a_gpu_says_nothing_measured_whether_its_size_is_known_or_not() -> None:
    host = {"rss_bytes": 90.0, "rss_peak_bytes": 100.0, "pss_bytes": 50.0}
    planned = WorkerMemory({"weights": 5, "kv_cache": 9}, {"process": 40}, on_gpu=True)
    workers: Any = {
        "actor": [Reading(memory={**host, "device_peak_bytes": 7.0})],
        "engine": [Reading(memory=host)],
        "prm": [Reading(memory=host)],
    }
    on_gpu = frozenset({"actor", "engine", "prm"})
    metrics = await MemoryReport({"engine": (planned,)}, workers, on_gpu).measure()
    assert metrics == {"memory/actor/measured_bytes": 7.0, "memory/engine/planned_bytes": 14.0}
