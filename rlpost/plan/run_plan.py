"""The whole plan of a run: a value that is printed, written down, and checked against a machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rlpost.cluster.nodes import Node
from rlpost.config import RunConfig, build
from rlpost.errors import ConfigError
from rlpost.loops.passes import rounds
from rlpost.plan import arithmetic
from rlpost.plan.arithmetic import Split
from rlpost.plan.cuts import cut_problems
from rlpost.plan.disk import DiskPlan, disk_plan, disk_problems
from rlpost.plan.folder import leave_nothing
from rlpost.plan.machine import Machine, this_machine
from rlpost.plan.memory import MemoryPlan, Shapes, colocated, memory_plan
from rlpost.plan.memory_fit import MemoryFit, kv_cache_problems, memory_warnings
from rlpost.plan.placement import Bundle, bundles, groups, placements
from rlpost.plan.printing import sections
from rlpost.plan.resources import KINDS, resource_problems
from rlpost.plan.short import short_lines
from rlpost.plan.sizes import shapes

TEXT = "plan.txt"
UNLIMITED = 1e9


@dataclass(frozen=True)
class RunPlan:
    """Batch arithmetic, steps, passes, placement, memory, disk and deadlines; nothing is started.

    128 samples in groups of 8, 2 minibatches, 2 data-parallel ranks: 16 prompts per step,
    64 samples per optimizer step, 32 of them on each rank.
    """

    algorithm: str
    data: str
    num_prompts: int  # per epoch
    prompts_per_step: int
    group_size: int
    train_batch_size: int
    num_minibatches: int
    num_steps: int
    steps_per_epoch: int
    staleness: str
    passes: tuple[str, ...]
    order: tuple[tuple[str, ...], ...]  # `pass: role`, side by side, round after round
    splits: dict[str, Split]
    nodes: tuple[str, ...]
    bundles: tuple[Bundle, ...]
    colocated: tuple[str, ...]
    num_parameters: dict[str, int | None]
    memory: MemoryPlan
    disk: DiskPlan | None
    machine: Machine
    deadlines_s: dict[str, float]
    problems: tuple[str, ...]  # it can't run
    warnings: tuple[str, ...]  # it might not

    @property
    def samples_per_minibatch(self) -> int:
        return self.train_batch_size // self.num_minibatches

    @classmethod
    def of(cls, config: RunConfig) -> RunPlan:
        """Reads the data set for its size. Raises ConfigError if it holds less than one batch."""
        data, num_prompts = arithmetic.data_set(config)
        arithmetic.check_eval_data(config)
        prompts_per_step = config.train_batch_size // config.group_size
        num_steps = arithmetic.num_steps(config, num_prompts, prompts_per_step)
        steps_per_epoch = max(1, num_prompts // prompts_per_step)
        return cls(
            algorithm=config.algorithm.target.__name__,
            data=data,
            num_prompts=num_prompts,
            prompts_per_step=prompts_per_step,
            group_size=config.group_size,
            train_batch_size=config.train_batch_size,
            num_minibatches=config.algorithm.config.num_minibatches,
            num_steps=num_steps,
            steps_per_epoch=steps_per_epoch,
            staleness=arithmetic.staleness(config),
            passes=arithmetic.pass_names(config),
            order=order(config),
            splits=arithmetic.splits(config),
            deadlines_s=dict(arithmetic.deadlines(config)),
            **room(config, num_steps, steps_per_epoch),
        )

    def check(self) -> None:
        """Raises ConfigError if the run can't fit."""
        if self.problems:
            raise ConfigError(list(self.problems))

    def print(self, console: Console | None = None) -> None:
        console = console or Console()
        for item in sections(self):
            console.print(item)

    def show(self, run_dir: Path, *, in_sweep: bool) -> None:
        """Prints it for a launch that does nothing else. Raises ConfigError if it can't fit."""
        self.print()
        if not in_sweep:
            leave_nothing(run_dir)
        self.check()

    def announce(self, run_dir: Path, *, in_sweep: bool) -> None:
        """Says in a few lines what begins; of a sweep's job only what might go wrong."""
        lines = list(short_lines(self, run_dir / TEXT))
        if in_sweep:
            lines = [f"warning: {line}" for line in self.warnings]
        console = Console(soft_wrap=True, highlight=False)
        for line in lines:
            console.print(line.replace(f"{Path.cwd()}/", ""), markup=False)

    def write(self, folder: Path) -> list[Path]:
        """For people and for programs."""
        text, data = folder / TEXT, folder / "plan.json"
        with text.open("w") as file:
            self.print(Console(file=file, width=100))
        data.write_text(json.dumps(self.plain(), indent=1))
        return [text, data]

    def plain(self) -> dict[str, Any]:
        values = asdict(self)
        loads = self.memory.devices.items()
        values["memory"]["devices"] = {
            f"node {node} GPU {gpu}": asdict(load) for (node, gpu), load in loads
        }
        return values


def order(config: RunConfig) -> tuple[tuple[str, ...], ...]:
    """The passes of a batch, then training; what a round holds runs side by side."""
    if not arithmetic.trained_roles(config):
        return ()
    passes = [
        tuple(f"{item.name}: {item.role}" for item in ready)
        for ready in rounds(arithmetic.passes(config))
    ]
    return (*passes, tuple(f"train: {role}" for role in arithmetic.trained_roles(config)))


def room(config: RunConfig, num_steps: int, steps_per_epoch: int) -> dict[str, Any]:
    """Where everything goes, what it takes there, and whether that is there."""
    cluster = build(config.cluster, log_dir=Path(config.output_dir))
    demands = placements(config)
    here = getattr(cluster, "num_nodes", None) == 1 and not cluster.expected()
    with_gpus = any(item.num_gpus for items in demands.values() for item in items)
    machine = this_machine(Path(config.output_dir), with_gpus=with_gpus and here)
    known = shapes(config)
    nodes = nodes_of(cluster)
    placed = place(config, cluster, nodes)
    memory = memory_plan(config, known, placed, machine.device_bytes)
    disk = disk_plan(config, known, num_steps, steps_per_epoch)
    compared = machine if here else elsewhere(machine)
    return {
        "nodes": tuple(map(str, nodes)) if cluster.capacity() else (),
        "bundles": tuple(placed),
        "colocated": tuple(groups(demands, colocated(config))),
        "num_parameters": {
            role: None if shape is None else shape.num_parameters() for role, shape in known.items()
        },
        "memory": memory,
        "disk": disk,
        "machine": compared,
        "problems": (
            *arithmetic.resume_problems(config, num_steps),
            *arithmetic.profile_problems(config, num_steps),
            *problems(config, cluster, nodes, known, memory, placed, compared, disk),
        ),
        "warnings": tuple(memory_warnings(config, memory, compared)),
    }


def elsewhere(machine: Machine) -> Machine:
    """The run's nodes are not this machine; its disk is shared with them."""
    return Machine(None, None, None, machine.free_disk_bytes)


def nodes_of(cluster: Any) -> list[Node]:
    """As expected; one that holds all where nothing is known before the start."""
    expected: list[Node] = cluster.expected()
    if expected:
        return expected
    capacity: Mapping[str, tuple[float, str]] = cluster.capacity()
    have = {kind: capacity[kind][0] if capacity else UNLIMITED for kind in KINDS}
    return [Node(0, "this machine", have["num_cpus"], have["num_gpus"])]


def place(config: RunConfig, cluster: Any, nodes: Sequence[Node]) -> list[Bundle]:
    cores = getattr(config.cluster.config, "cores", {})
    pins = cluster.pins if cluster.expected() else {}
    return bundles(placements(config), nodes, pins, cores)


def problems(
    config: RunConfig,
    cluster: Any,
    nodes: Sequence[Node],
    known: Shapes,
    memory: MemoryPlan,
    placed: Sequence[Bundle],
    machine: Machine,
    disk: DiskPlan | None,
) -> list[str]:
    # A change may ask for more CPUs or GPUs; whether those are there is another question.
    wide = [replace(node, num_cpus=UNLIMITED, num_gpus=UNLIMITED) for node in nodes]

    def replan(changed: RunConfig) -> MemoryPlan:
        return memory_plan(changed, known, place(changed, cluster, wide), machine.device_bytes)

    uneven = list(cut_problems(config, known))

    def bears(changed: RunConfig) -> bool:
        return all(problem in uneven for problem in cut_problems(changed, known))

    return [
        *uneven,
        *resource_problems(config, cluster),
        *MemoryFit(config, memory, placed, replan, bears).problems(machine),
        *kv_cache_problems(config, known, memory, machine.device_bytes),
        *disk_problems(config, disk, machine),
    ]
