"""What checkpoints take of the disk, and whether that is free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlpost.config import RunConfig
from rlpost.memory import size
from rlpost.plan.arithmetic import trained_roles
from rlpost.plan.machine import Machine
from rlpost.plan.memory import Shapes, head_of
from rlpost.roles import trainer_roles


@dataclass(frozen=True)
class DiskPlan:
    """`roles` of one checkpoint: Megatron's format and the Hugging Face folder, bytes.

    A checkpoint is complete before an older one goes, so for a while there is one more than kept.
    Samples, logs and models that are built on first use come on top.
    """

    roles: dict[str, int]
    num_saves: int
    num_kept: int

    @property
    def checkpoint_bytes(self) -> int:
        return sum(self.roles.values())

    @property
    def peak_bytes(self) -> int:
        return self.checkpoint_bytes * min(self.num_kept + 1, self.num_saves)


def disk_plan(
    config: RunConfig, shapes: Shapes, num_steps: int, steps_per_epoch: int
) -> DiskPlan | None:
    """None where a size is not known."""
    roles = {}
    for role, parts in trainer_roles(config).items():
        shape, trainer = shapes.get(role), parts.trainer.config
        if role not in trained_roles(config):
            continue
        if shape is None or not hasattr(trainer, "checkpoint_bytes"):
            return None
        dtype, head = parts.model.config.dtype, head_of(parts.trainer)
        roles[role] = trainer.checkpoint_bytes(shape, dtype, head)
    saves = num_saves(num_steps, steps_per_epoch, config.checkpoint.config.save_interval)
    return DiskPlan(roles, saves, min(config.checkpoint.config.keep_last, saves))


def num_saves(num_steps: int, steps_per_epoch: int, interval: int) -> int:
    """At intervals, at epoch ends and at the last step: 10 steps, epochs of 4, interval 5 -> 4."""
    due = {num_steps} | set(range(steps_per_epoch, num_steps + 1, steps_per_epoch))
    return len(due | set(range(interval, num_steps + 1, interval) if interval else ()))


def disk_problems(config: RunConfig, disk: DiskPlan | None, machine: Machine) -> Iterator[str]:
    """Nothing where the size of a checkpoint, or what is free, is not known."""
    free = machine.free_disk_bytes
    if disk is None or free is None or disk.peak_bytes <= free:
        return
    fitting = free // disk.checkpoint_bytes - 1
    way = f"set checkpoint.keep_last={fitting}, " if fitting >= 1 else "free some space, "
    yield (
        f"checkpoint.keep_last ({config.checkpoint.config.keep_last}): checkpoints of "
        f"{size(disk.checkpoint_bytes)} take up to {size(disk.peak_bytes)} while one more is "
        f"written, but output_dir ({config.output_dir}) has {size(free)} free; {way}"
        "or choose another output_dir"
    )
