"""The arithmetic of memory and disk, what the machine says, and the folder of a plan."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_ranks import trainer_config

from rlpost.engines.memory import EngineTask, kv_cache_tokens
from rlpost.engines.vllm import VllmEngineConfig
from rlpost.loops.memory_report import MemoryReport
from rlpost.memory import WorkerMemory, family_memory, process_memory, size
from rlpost.models.shape import Cut, ModelShape
from rlpost.plan.disk import DiskPlan, num_saves
from rlpost.plan.folder import leave_nothing
from rlpost.plan.machine import free_disk, meminfo, this_machine
from rlpost.tracking.console import memory_line
from rlpost.trainers.base import RankTask

MIB = 1 << 20
SHAPE = ModelShape(
    num_layers=2,
    hidden_size=16,
    intermediate_size=32,
    num_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=100,
    tied=False,
    qkv_bias=False,
    projection_bias=False,
    mlp_bias=False,
    head_norms=False,
)
LAYER = 16 * (16 + 2 * 8) + 16 * 16 + 3 * 16 * 32 + 2 * 16
WHOLE = 2 * LAYER + 2 * 100 * 16 + 16
TASK = RankTask(
    shape=SHAPE,
    dtype="float32",
    rank=0,
    trained=True,
    longest_tokens=10,
    num_samples=4,
    teacher=None,
    exports=False,
)


def parts(task: RankTask = TASK, head: Any = "logits", **config: Any) -> dict[str, int]:
    return dict(trainer_config(**config).memory(task, head).parts)


def test_a_trained_rank_holds_weights_gradients_and_two_moments() -> None:
    found = parts()
    assert found["weights"] == found["gradients"] == 4 * WHOLE
    assert found["optimizer"] == 8 * WHOLE


def test_bfloat16_adds_a_copy_of_the_weights_to_the_optimizer() -> None:
    found = parts(replace(TASK, dtype="bfloat16"), dp=2)
    assert (found["weights"], found["gradients"]) == (2 * WHOLE, 4 * WHOLE)
    assert found["optimizer"] == 12 * WHOLE // 2


def test_a_frozen_rank_holds_weights_only() -> None:
    found = parts(replace(TASK, trained=False))
    assert set(found) == {"weights", "activations", "logits"}
    assert found["activations"] < parts()["activations"]


def test_a_teacher_in_the_rank_is_held_beside_the_model() -> None:
    assert parts(replace(TASK, teacher=SHAPE))["weights"] == 2 * 4 * WHOLE


def test_ranks_hold_their_cut_of_the_model() -> None:
    halves = LAYER - 2 * 16
    assert SHAPE.num_parameters(cut=Cut(tp=2)) == halves + 2 * 2 * 16 + 100 * 16 + 16
    assert parts(tp=2)["weights"] == 4 * SHAPE.num_parameters(cut=Cut(tp=2))
    first, last = (parts(replace(TASK, rank=rank), pp=2) for rank in (0, 1))
    assert first["weights"] == 4 * (LAYER + 100 * 16)
    assert last["weights"] == 4 * (LAYER + 16 + 100 * 16)
    assert "logits" not in first and first["activations"] == 2 * last["activations"]


def test_the_first_data_parallel_rank_gathers_a_checkpoint_on_the_host() -> None:
    config = trainer_config(tp=2, dp=2, num_gpus_per_rank=1.0)
    ranks = [config.memory(replace(TASK, rank=rank), "logits") for rank in range(4)]
    assert ["save" in rank.host_parts for rank in ranks] == [True, True, False, False]
    assert all("save" not in rank.parts and rank.on_gpu for rank in ranks)
    frozen = config.memory(replace(TASK, trained=False), "logits")
    assert "save" not in frozen.host_parts


def test_a_value_head_has_no_vocabulary() -> None:
    found = parts(head="value")
    assert found["weights"] == 4 * (WHOLE - 100 * 16 + 17)
    assert "logits" not in found


def test_padding_rows_of_the_vocabulary_are_held() -> None:
    padded = parts(make_vocab_size_divisible_by=128)
    assert padded["weights"] == 4 * (WHOLE + 2 * 28 * 16)


def test_activations_grow_with_the_tokens_of_a_micro_batch() -> None:
    few, many = (parts(replace(TASK, num_samples=count))["activations"] for count in (1, 4))
    assert many == 4 * few
    assert parts(micro_batch_tokens=20)["activations"] == 2 * few
    options = {"recompute_granularity": "full"}
    assert parts(megatron=options)["activations"] < many


def engine(**changes: Any) -> VllmEngineConfig:
    values: dict[str, Any] = {
        "num_engines": 1,
        "tensor_parallel_size": 1,
        "process_layout": "auto",
        "num_cpus_per_engine": 1.0,
        "num_gpus_per_engine": 0.0,
        "threads_per_engine": 1,
        "start_deadline_s": 1.0,
        "vllm": {"kv_cache_memory_bytes": 64 * MIB},
    }
    return VllmEngineConfig(**values | changes)


def test_an_engine_holds_weights_and_the_cache_it_was_given() -> None:
    task = EngineTask(SHAPE, "float32", 32, "logits", device_bytes=None)
    found = engine().memory(task)
    assert found.certain_bytes == 4 * WHOLE + 64 * MIB
    assert found.parts["packed"] == 4 * (WHOLE - 100 * 16)  # all but the table of embeddings
    # keys and values of 2 layers, 2 heads of 4 in float32: 128 bytes a token
    assert kv_cache_tokens(engine(), task, 64 * MIB) == 64 * MIB // 128


def test_an_engine_on_a_gpu_takes_its_share_of_it() -> None:
    task = EngineTask(SHAPE, "bfloat16", 32, "logits", device_bytes=8192 * MIB)
    config = engine(num_gpus_per_engine=1.0, vllm={"gpu_memory_utilization": 0.5})
    assert config.memory(task).device_bytes == 4096 * MIB
    unknown = config.memory(replace(task, device_bytes=None))
    assert "kv_cache" not in unknown.parts


@pytest.mark.parametrize(("num_kept", "saves", "most"), [(2, 5, 3), (2, 2, 2), (1, 1, 1)])
def test_one_checkpoint_more_than_is_kept_is_there_for_a_while(
    num_kept: int, saves: int, most: int
) -> None:
    assert DiskPlan({"actor": 10, "critic": 5}, saves, num_kept).peak_bytes == most * 15


def test_saves_at_intervals_at_epoch_ends_and_at_the_last_step() -> None:
    assert num_saves(10, steps_per_epoch=4, interval=5) == 4  # 4, 5, 8, 10
    assert num_saves(10, steps_per_epoch=100, interval=0) == 1


# -- the system ----------------------------------------------------------------------------------


def test_sizes_are_said_in_units() -> None:
    assert [size(n) for n in (12, 2048, 48 * MIB, 3 << 29, 24 << 30)] == [
        "12 B",
        "2.0 KiB",
        "48 MiB",
        "1.5 GiB",
        "24 GiB",
    ]


def test_the_machine_is_read_from_the_system(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  2048 kB\nMemAvailable: 1024 kB\nHugePages_Total: 0\n")
    assert meminfo(file) == {"MemTotal": 2048 * 1024, "MemAvailable": 1024 * 1024}
    assert meminfo(tmp_path / "none") == {}
    assert free_disk(tmp_path / "not" / "there") == free_disk(tmp_path)
    machine = this_machine(tmp_path, with_gpus=False)
    assert machine.host_bytes and machine.free_disk_bytes and machine.device_bytes is None


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


def test_a_plans_folder_goes_and_a_runs_folder_stays(tmp_path: Path) -> None:
    for name in ("planned", "used"):
        (tmp_path / name / "time" / ".hydra").mkdir(parents=True)
        (tmp_path / name / "time" / "launch.log").touch()
    (tmp_path / "used" / "time" / "metrics.jsonl").touch()
    leave_nothing(tmp_path / "planned" / "time")
    leave_nothing(tmp_path / "used" / "time")
    leave_nothing(tmp_path / "nowhere")
    assert sorted(os.listdir(tmp_path)) == ["used"]
    assert (tmp_path / "used" / "time" / "metrics.jsonl").exists()


# -- planned against measured --------------------------------------------------------------------


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
