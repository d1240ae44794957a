"""torch's profiler in this process: what it leaves, and the table of memory."""

from __future__ import annotations

import gzip
import json
import threading

import torch

from rlpost.profiling import ProfileConfig, TorchProfiler, memory_table

CONFIG = ProfileConfig(
    first_step=2,
    num_steps=3,
    record_shapes=False,
    with_stack=False,
    profile_memory=True,
    artifacts=False,
)


def multiply() -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)


def test_the_trace_holds_the_work_of_all_threads(tmp_path):
    other = threading.Thread(target=multiply)
    profiler = TorchProfiler(CONFIG)
    multiply()
    other.start()
    other.join()
    peaks = profiler.stop(tmp_path / "profile" / "actor-0.json.gz")
    assert peaks["process"] > 50 * 2**20
    with gzip.open(tmp_path / "profile" / "actor-0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    threads = {event["tid"] for event in events if event.get("name") == "aten::matmul"}
    assert len(threads) == 2


def test_memory_is_a_line_for_each_process():
    peaks = {"actor-0": {"process": 2**30, "gpu_allocated": 2**21}, "engine-0": {"process": 2**20}}
    lines = [line.split() for line in memory_table(peaks).splitlines()]
    assert lines[1:] == [["actor-0", "1024", "2"], ["engine-0", "1", "-"]]


def test_the_last_step_follows():
    assert CONFIG.last_step == 4
