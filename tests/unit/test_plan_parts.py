"""Checkpoints on the disk, what the machine says, and the folder of a plan."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlpost.plan.disk import DiskPlan, num_saves
from rlpost.plan.folder import leave_nothing
from rlpost.plan.machine import free_disk, meminfo, this_machine


@pytest.mark.parametrize(("num_kept", "saves", "most"), [(2, 5, 3), (2, 2, 2), (1, 1, 1)])
def test_one_checkpoint_more_than_is_kept_is_there_for_a_while(
    num_kept: int, saves: int, most: int
) -> None:
    assert DiskPlan({"actor": 10, "critic": 5}, saves, num_kept).peak_bytes == most * 15


def test_saves_at_intervals_at_epoch_ends_and_at_the_last_step() -> None:
    assert num_saves(10, steps_per_epoch=4, interval=5) == 4  # 4, 5, 8, 10
    assert num_saves(10, steps_per_epoch=100, interval=0) == 1


def test_the_machine_is_read_from_the_system(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  2048 kB\nMemAvailable: 1024 kB\nHugePages_Total: 0\n")
    assert meminfo(file) == {"MemTotal": 2048 * 1024, "MemAvailable": 1024 * 1024}
    assert meminfo(tmp_path / "none") == {}
    assert free_disk(tmp_path / "not" / "there") == free_disk(tmp_path)
    machine = this_machine(tmp_path, with_gpus=False)
    assert machine.host_bytes and machine.free_disk_bytes and machine.device_bytes is None


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
