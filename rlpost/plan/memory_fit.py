"""Whether the planned memory is there, and the smallest changes that would make it fit.

Only what is certain to be needed refuses a run; estimates that exceed the machine are warnings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.config import RunConfig
from rlpost.engines.memory import kv_cache_tokens, kv_token_bytes
from rlpost.memory import CERTAIN, MIB, WorkerMemory, size
from rlpost.plan import variants
from rlpost.plan.machine import Machine
from rlpost.plan.memory import Load, MemoryPlan, Shapes, engine_task
from rlpost.plan.placement import Bundle
from rlpost.roles import engine_roles

SHOWN = 3  # workers named in a message


@dataclass(frozen=True)
class MemoryFit:
    """`plan` is of `config` and `bundles`; `replan` plans a changed configuration.

    `bears` says whether the models can be cut as a changed configuration asks.
    """

    config: RunConfig
    plan: MemoryPlan
    bundles: Sequence[Bundle]
    replan: Callable[[RunConfig], MemoryPlan]
    bears: Callable[[RunConfig], bool]

    def problems(self, machine: Machine) -> Iterator[str]:
        """One line for each node and each GPU that what is certain does not fit into."""
        for node, load in self.plan.hosts.items():
            if machine.host_bytes is not None and load.certain > machine.host_bytes:
                here = [bundle for bundle in self.bundles if bundle.node == node]
                shown = self._shown(here, on_gpu=False)
                advice = self._advice(load, machine.host_bytes, on_gpu=False)
                yield (
                    f"memory of node {node}: {shown} exceeds {size(machine.host_bytes)}; "
                    f"try {advice}"
                )
        for (node, gpu), load in self.plan.devices.items():
            if machine.device_bytes is not None and load.certain > machine.device_bytes:
                here = [item for item in self.bundles if item.node == node and gpu in item.gpus]
                shown = self._shown(here, on_gpu=True)
                advice = self._advice(load, machine.device_bytes, on_gpu=True)
                yield (
                    f"GPU {gpu} of node {node}: {shown} exceeds {size(machine.device_bytes)}; "
                    f"try {advice}"
                )

    def _shown(self, here: Sequence[Bundle], *, on_gpu: bool) -> str:
        """`actor[0] 12 GiB (weights 8 GiB) + engine[0] 9 GiB (kv_cache 8 GiB) + ...`"""
        known = [bundle for bundle in here if bundle.role in self.plan.workers]
        holders = [(item.name, self.plan.workers[item.role][item.rank]) for item in known]
        holders = [item for item in holders if item[1].on_gpu == on_gpu and item[1].certain_bytes]
        holders.sort(key=lambda holder: -holder[1].certain_bytes)
        shown = " + ".join(f"{name} {largest(memory)}" for name, memory in holders[:SHOWN])
        return shown + (" + ..." if len(holders) > SHOWN else "")

    def _advice(self, load: Load, have: int, *, on_gpu: bool) -> str:
        ways = self._ways(load, have, on_gpu=on_gpu)
        return variants.either(ways) or "a smaller model, or more memory"

    def _ways(self, load: Load, have: int, *, on_gpu: bool) -> list[str]:
        """The first change of each key after which all of one kind of memory fits.

        With the estimates, or, where no change is enough for those, without them.
        """
        for count in (planned, certain):
            tried = changes(self.config, count(load) - have, on_gpu=on_gpu)
            ways = variants.first_of_each_key(
                text
                for text, made in tried
                if self.bears(made)
                and all(count(item) <= have for item in self._loads(made, on_gpu=on_gpu))
            )
            if ways:
                return ways
        return []

    def _loads(self, changed: RunConfig, *, on_gpu: bool) -> list[Load]:
        plan = self.replan(changed)
        return list(plan.devices.values() if on_gpu else plan.hosts.values())


def largest(memory: WorkerMemory) -> str:
    """The worker's bytes and the part that is most of them."""
    certain = {name: value for name, value in memory.parts.items() if name in CERTAIN}
    part = max(certain, key=lambda name: certain[name])
    return f"{size(memory.certain_bytes)} ({part} {size(certain[part])})"


def planned(load: Load) -> int:
    return load.planned


def certain(load: Load) -> int:
    return load.certain


def changes(config: RunConfig, excess: int, *, on_gpu: bool) -> Iterator[variants.Variant]:
    """What may help against `excess` bytes, from what costs least to what costs most."""
    count = config.engine.config.num_engines if config.engine is not None else 1
    less = -(-excess // (1 if on_gpu else count) // MIB) * MIB
    yield from variants.smaller_kv_cache(config, less)
    yield from variants.fewer_workers(config)
    if on_gpu:
        yield from variants.cut_over_more(config)
    yield from variants.halves(config)


def kv_cache_problems(
    config: RunConfig, shapes: Shapes, plan: MemoryPlan, device_bytes: int | None
) -> Iterator[str]:
    """An engine whose cache can't hold one longest sequence would not start."""
    for role, section in engine_roles(config).items():
        shape, workers = shapes.get(role), plan.workers.get(role)
        if shape is None or workers is None or "kv_cache" not in workers[0].parts:
            continue
        task = engine_task(config, role, shape, device_bytes)
        ranks = section.config.tensor_parallel_size if section.config.on_cpu else 1
        held = workers[0].parts["kv_cache"] // ranks
        if kv_cache_tokens(section.config, task, held) < task.max_model_len:
            least = task.max_model_len * kv_token_bytes(section.config, task)
            yield (
                f"{section.path}.vllm: a KV cache of {size(held)} holds "
                f"{kv_cache_tokens(section.config, task, held)} tokens, less than one sequence of "
                f"max_length ({task.max_model_len}); {kv_way_out(section.config, least)}"
            )


def kv_way_out(engine: Any, least: int) -> str:
    if "kv_cache_memory_bytes" in engine.vllm:
        return f"set kv_cache_memory_bytes to {-(-least // MIB) * MIB} or more, or lower max_length"
    return f"it needs {size(least)}: raise gpu_memory_utilization, or lower max_length"


def memory_warnings(config: RunConfig, plan: MemoryPlan, machine: Machine) -> Iterator[str]:
    """What may become tight although nothing that is certain exceeds the machine."""
    host = plan.hosts.get(0, Load(0, 0))
    if machine.available_bytes is not None and host.planned > machine.available_bytes:
        yield (
            f"about {size(host.planned)} of memory are planned on this machine, of which "
            f"{size(machine.available_bytes)} are free now"
        )
    for (node, gpu), load in plan.devices.items():
        if machine.device_bytes is not None and load.planned > machine.device_bytes >= load.certain:
            yield (
                f"about {size(load.planned)} are planned on GPU {gpu} of node {node}, which has "
                f"{size(machine.device_bytes)}; lower micro_batch_tokens if it runs out of memory"
            )
    store = getattr(config.cluster.config, "object_store_bytes", None)
    if store is not None and plan.object_store > store:
        yield (
            f"weights of {size(plan.object_store)} pass through an object store of {size(store)} "
            f"and spill to disk; set cluster.object_store_bytes={plan.object_store}"
        )
