"""The plan as small tables, for people. Numbers with ~ are estimates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rlpost.memory import CERTAIN, WorkerMemory, size
from rlpost.plan.memory import Load

if TYPE_CHECKING:
    from rlpost.plan.run_plan import RunPlan


def sections(plan: RunPlan) -> Iterator[Any]:
    yield table("batch", batch(plan))
    yield table("steps", steps(plan))
    yield table("passes, in order", enumerate(map(", ".join, plan.order), start=1))
    yield placement(plan)
    yield memory(plan)
    yield table("memory, all together", totals(plan))
    yield table("disk", disk(plan))
    yield table("deadlines", [(key, f"{value:g} s") for key, value in plan.deadlines_s.items()])
    for line in plan.warnings:
        yield f"warning: {line}"


def batch(plan: RunPlan) -> Iterator[tuple[str, Any]]:
    yield "prompts per step", plan.prompts_per_step
    yield "rollouts per prompt", plan.group_size
    yield "samples per batch", plan.train_batch_size
    yield "optimizer steps per visit of a batch", plan.num_minibatches
    yield "samples per optimizer step", plan.samples_per_minibatch
    for role, split in plan.splits.items():
        name = f"{role}: {split.data_parallel_size} data-parallel rank"
        name += "s"[: split.data_parallel_size != 1]
        if split.of_optimizer_step is None:
            yield name, f"{split.of_batch} samples of a batch each"
        else:
            yield name, f"{split.of_optimizer_step} samples of an optimizer step each"


def steps(plan: RunPlan) -> Iterator[tuple[str, Any]]:
    yield "prompts per epoch", plan.num_prompts
    yield "steps per epoch", plan.steps_per_epoch
    yield "steps", plan.num_steps
    yield "staleness of a batch", plan.staleness


def placement(plan: RunPlan) -> Table:
    made = Table(title="placement", title_justify="left")
    for column in ("node", "device", "worker", "CPUs"):
        made.add_column(column)
    for row in placement_rows(plan):
        made.add_row(*row)
    if not plan.nodes:
        made.caption = "nodes are known when the run has joined the cluster"
    elif plan.colocated:
        made.caption = "take turns: " + "; ".join(plan.colocated)
    return made


def placement_rows(plan: RunPlan) -> Iterator[tuple[str, str, str, str]]:
    node = -1
    for bundle in plan.bundles:
        name = "" if bundle.node == node else str(bundle.node) if plan.nodes else "?"
        node = bundle.node
        yield name, bundle.device, bundle.name, f"{bundle.num_cpus:g}"


def memory(plan: RunPlan) -> Table:
    made = Table(title="memory of each worker", title_justify="left")
    for column in ("role", "on", "parts", "each"):
        made.add_column(column)
    for role, workers in plan.memory.workers.items():
        largest = max(workers, key=lambda worker: sum(worker.parts.values()))
        count = f"{role} x {len(workers)}" if len(workers) > 1 else role
        place = "GPU" if largest.on_gpu else "host"
        taken = largest.device_bytes if largest.on_gpu else largest.host_bytes
        made.add_row(count, place, parts(largest), size(taken))
    for role, reason in plan.memory.unknown.items():
        made.add_row(role, "", reason, "")
    return made


def parts(worker: WorkerMemory) -> str:
    shown = worker.parts if worker.on_gpu else {**worker.parts, **worker.host_parts}
    return ", ".join(
        f"{'' if name in CERTAIN else '~'}{name} {size(value)}" for name, value in shown.items()
    )


def totals(plan: RunPlan) -> Iterator[tuple[str, str]]:
    machine = plan.machine
    for name, value in plan.memory.shared.items():
        yield f"~{name}", size(value)
    for node, load in plan.memory.hosts.items():
        yield f"host of node {node}", compared(load, machine.host_bytes)
    if machine.available_bytes is not None:
        yield "free on this machine now", size(machine.available_bytes)
    for (node, gpu), load in plan.memory.devices.items():
        yield f"GPU {gpu} of node {node}", compared(load, machine.device_bytes)


def compared(load: Load, have: int | None) -> str:
    of = "" if have is None else f" of {size(have)}"
    return f"~{size(load.planned)}{of}, of which certain: {size(load.certain)}"


def disk(plan: RunPlan) -> Iterator[tuple[str, str]]:
    if plan.disk is None:
        yield "checkpoints", "unknown until the model is there"
        return
    if not plan.disk.roles:
        yield "checkpoints", "none: nothing is trained"
        return
    for role, value in plan.disk.roles.items():
        yield f"{role}, in one checkpoint", size(value)
    yield "checkpoints saved", f"{plan.disk.num_saves}, of which {plan.disk.num_kept} are kept"
    yield "at most", size(plan.disk.peak_bytes)
    if plan.machine.free_disk_bytes is not None:
        yield "free", size(plan.machine.free_disk_bytes)


def table(title: str, rows: Iterable[tuple[Any, Any]]) -> Table:
    made = Table(title=title, title_justify="left", show_header=False, min_width=len(title) + 4)
    for name, value in rows:
        made.add_row(str(name), str(value))
    return made
