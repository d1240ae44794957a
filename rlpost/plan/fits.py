"""Whether a run fits into what there is, and the smallest changes that would make it fit.

Only what is certain to be needed refuses a run; estimates that exceed the machine are warnings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rlpost.cluster import gpus
from rlpost.cluster.nodes import Demands
from rlpost.config import RunConfig
from rlpost.engines.memory import kv_cache_tokens, kv_token_bytes
from rlpost.errors import ConfigError
from rlpost.memory import CERTAIN, WorkerMemory, size
from rlpost.plan import variants
from rlpost.plan.disk import DiskPlan
from rlpost.plan.machine import Machine
from rlpost.plan.memory import Load, MemoryPlan, Shapes, engine_task
from rlpost.plan.placement import Bundle, placements
from rlpost.roles import engine_roles

KINDS = ("num_cpus", "num_gpus")
MIB = 1 << 20
SHOWN = 3


def either(ways: Iterable[str]) -> str:
    """The first ways of each kind, joined; "" without any."""
    return " or ".join(dict.fromkeys(ways))


def need(demands: Demands, kind: str) -> float:
    if kind == "num_gpus":
        return gpus.num_gpus(demands)
    return sum(item.num_cpus for items in demands.values() for item in items)


# -- CPUs and GPUs of the cluster ----------------------------------------------------------------


def resource_problems(config: RunConfig, cluster: Any) -> list[str]:
    demands = placements(config)
    short = [
        short_of(config, cluster, kind, have, keys)
        for kind, (have, keys) in cluster.capacity().items()
        if need(demands, kind) > have
    ]
    if short:
        return short
    try:
        cluster.check_fits(demands)
    except ConfigError as error:
        return list(error.problems)
    return []


def short_of(config: RunConfig, cluster: Any, kind: str, have: float, keys: str) -> str:
    """`cluster.num_cpus (8) is less than the roles need (10: ...); set cluster.num_cpus=10 or`"""
    demands = placements(config)
    needed = need(demands, kind)
    parts = {role: need({role: items}, kind) for role, items in demands.items()}
    shown = ", ".join(f"{role} {count:g}" for role, count in parts.items() if count)
    ways = either([*more_of(cluster, kind, have, needed), *less_needed(config, kind, have)])
    advice = f"; set {ways}" if ways else ""
    return f"{keys} is less than the roles need ({needed:g}: {shown}){advice}"


def more_of(cluster: Any, kind: str, have: float, needed: float) -> Iterator[str]:
    if hasattr(cluster.config, kind):
        yield f"cluster.{kind}={math.ceil(needed)}"
    elif have and hasattr(cluster.config, "num_nodes"):
        nodes = cluster.config.num_nodes
        yield f"cluster.num_nodes={math.ceil(needed * nodes / have)}"


def less_needed(config: RunConfig, kind: str, have: float) -> Iterator[str]:
    """Of each key, the change nearest to what was asked that is enough by itself."""
    yield from first_of_each_key(
        text
        for text, made in variants.fewer_workers(config)
        if need(placements(made), kind) <= have
    )


# -- memory --------------------------------------------------------------------------------------


def memory_problems(
    config: RunConfig,
    plan: MemoryPlan,
    bundles: Sequence[Bundle],
    machine: Machine,
    replan: Callable[[RunConfig], MemoryPlan],
) -> Iterator[str]:
    """`replan` plans a changed configuration."""
    for node, load in plan.hosts.items():
        if machine.host_bytes is not None and load.certain > machine.host_bytes:
            here = [bundle for bundle in bundles if bundle.node == node]
            yield over(
                f"memory of node {node}", load, machine.host_bytes, plan, here, config, replan
            )
    for (node, gpu), load in plan.devices.items():
        if machine.device_bytes is not None and load.certain > machine.device_bytes:
            here = [item for item in bundles if item.node == node and gpu in item.gpus]
            yield over(
                f"GPU {gpu} of node {node}", load, machine.device_bytes, plan, here, config, replan
            )


def over(
    place: str,
    load: Load,
    have: int,
    plan: MemoryPlan,
    here: Sequence[Bundle],
    config: RunConfig,
    replan: Callable[[RunConfig], MemoryPlan],
) -> str:
    """`memory of node 0: actor[0] 12 GiB + engine[0] kv cache 12 GiB ... exceeds 23 GiB; lower`"""
    on_gpu = place.startswith("GPU")
    holders = [
        (bundle.name, plan.workers[bundle.role][bundle.rank])
        for bundle in here
        if bundle.role in plan.workers
    ]
    holders = [item for item in holders if item[1].on_gpu == on_gpu and item[1].certain_bytes]
    holders.sort(key=lambda holder: -holder[1].certain_bytes)
    shown = " + ".join(f"{name} {largest(memory)}" for name, memory in holders[:SHOWN])
    more = " + ..." if len(holders) > SHOWN else ""
    ways = ways_to_fit(config, load, have, on_gpu=on_gpu, replan=replan)
    advice = either(ways) or "a smaller model, or more memory"
    return f"{place}: {shown}{more} exceeds {size(have)}; try {advice}"


def largest(memory: WorkerMemory) -> str:
    """The worker's bytes and the part that is most of them."""
    certain = {name: value for name, value in memory.parts.items() if name in CERTAIN}
    part = max(certain, key=lambda name: certain[name])
    return f"{size(memory.certain_bytes)} ({part} {size(certain[part])})"


def ways_to_fit(
    config: RunConfig,
    load: Load,
    have: int,
    *,
    on_gpu: bool,
    replan: Callable[[RunConfig], MemoryPlan],
) -> list[str]:
    """The first change of each key after which all of one kind of memory fits.

    With the estimates, or, where no change is enough for those, without them.
    """

    def loads(changed: RunConfig) -> list[Load]:
        plan = replan(changed)
        return list(plan.devices.values() if on_gpu else plan.hosts.values())

    for count in (planned, certain):
        tried = changes(config, count(load) - have, on_gpu=on_gpu)
        ways = first_of_each_key(
            text for text, made in tried if all(count(item) <= have for item in loads(made))
        )
        if ways:
            return ways
    return []


def planned(load: Load) -> int:
    return load.planned


def certain(load: Load) -> int:
    return load.certain


def changes(config: RunConfig, excess: int, *, on_gpu: bool) -> Iterator[variants.Variant]:
    count = config.engine.config.num_engines if config.engine is not None else 1
    less = -(-excess // (1 if on_gpu else count) // MIB) * MIB
    yield from variants.smaller_kv_cache(config, less)
    yield from variants.fewer_workers(config)
    if on_gpu:
        yield from variants.cut_over_more(config)
    yield from variants.halves(config)


def first_of_each_key(texts: Iterable[str]) -> list[str]:
    found: dict[str, str] = {}
    for text in texts:
        found.setdefault(text.partition("=")[0], text)
    return list(found.values())


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


# -- disk ----------------------------------------------------------------------------------------


def disk_problems(config: RunConfig, disk: DiskPlan | None, machine: Machine) -> Iterator[str]:
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
