"""The plan in a few lines, as a run prints it. Numbers with ~ are estimates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlpost.memory import size

if TYPE_CHECKING:
    from rlpost.plan.run_plan import RunPlan

HEADS = ("trains", "batch", "steps", "workers", "takes", "whole plan")


def short_lines(plan: RunPlan, whole_plan: Path) -> Iterator[str]:
    """`whole_plan` is where the tables lie."""
    texts = (trains(plan), batch(plan), steps(plan), workers(plan), takes(plan), str(whole_plan))
    width = max(map(len, HEADS))
    yield from (f"{head:<{width}}  {text}" for head, text in zip(HEADS, texts, strict=True))
    yield from (f"warning: {line}" for line in plan.warnings)


def trains(plan: RunPlan) -> str:
    """`actor (1.1 M parameters) by Grpo on chain_sum`"""
    trained = [role for role, split in plan.splits.items() if split.of_optimizer_step is not None]
    if not trained:
        return f"nothing; answers to {plan.data}"
    sizes = (f"{role} ({parameters(plan.num_parameters.get(role))})" for role in trained)
    return f"{', '.join(sizes)} by {plan.algorithm} on {plan.data}"


def parameters(count: int | None) -> str:
    """`1.1 M parameters`"""
    if count is None:
        return "parameters unknown until the model is there"
    for unit, one in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= one:
            return f"{count / one:.3g} {unit} parameters"
    return f"{count} parameters"


def batch(plan: RunPlan) -> str:
    """`16 prompts x 8 = 128 samples, 2 optimizer steps of 64, 32 on each of 2 ranks`"""
    samples = f"{plan.prompts_per_step} prompts x {plan.group_size}"
    text = f"{samples} = {plan.train_batch_size} samples"
    split = plan.splits.get("actor")
    if split is None or split.of_optimizer_step is None:
        return text
    count = plan.num_minibatches
    text += f", {count} optimizer step{'s'[: count != 1]} of {plan.samples_per_minibatch}"
    ranks = split.data_parallel_size
    return text + (f", {split.of_optimizer_step} on each of {ranks} ranks" if ranks > 1 else "")


def steps(plan: RunPlan) -> str:
    return f"{plan.num_steps}, an epoch has {plan.steps_per_epoch}; staleness: {plan.staleness}"


def workers(plan: RunPlan) -> str:
    """`actor x 4 on 4 GPUs, engine x 2 on 2 GPUs, rollout on CPU; on 2 nodes`"""
    roles = dict.fromkeys(bundle.role for bundle in plan.bundles)
    nodes = {bundle.node for bundle in plan.bundles}
    text = ", ".join(worker(plan, role) for role in roles)
    text += "; taking turns" if plan.colocated else ""
    return text + (f"; on {len(nodes)} nodes" if len(nodes) > 1 else "")


def worker(plan: RunPlan, role: str) -> str:
    own = [bundle for bundle in plan.bundles if bundle.role == role]
    gpus = len({(bundle.node, gpu) for bundle in own for gpu in bundle.gpus})
    place = f"{gpus} GPU{'s'[: gpus != 1]}" if gpus else "CPU"
    return f"{role}{f' x {len(own)}' if len(own) > 1 else ''} on {place}"


def takes(plan: RunPlan) -> str:
    """`~5.1 GiB of 24 GiB, ~68 GiB of 80 GiB of a GPU, 60 MiB of disk`; of the fullest place."""
    memory, machine = plan.memory, plan.machine
    places = (
        ("", memory.hosts.values(), machine.host_bytes),
        (" of a GPU", memory.devices.values(), machine.device_bytes),
    )
    parts = [
        f"~{size(max(load.planned for load in loads))}"
        f"{'' if have is None else f' of {size(have)}'}{place}"
        for place, loads, have in places
        if loads
    ]
    if plan.disk is not None and plan.disk.peak_bytes:
        parts.append(f"{size(plan.disk.peak_bytes)} of disk for checkpoints")
    missing = f"; not counted: {', '.join(memory.unknown)}" if memory.unknown else ""
    return ", ".join(parts) + missing
