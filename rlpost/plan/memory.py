"""What every worker takes of its node's and its GPUs' memory, and what that adds up to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpost.config import RoleConfig, RunConfig, Section, build
from rlpost.engines.memory import EngineTask
from rlpost.memory import MIB, WorkerMemory
from rlpost.models.shape import DTYPE_BYTES, ModelShape
from rlpost.plan.arithmetic import splits
from rlpost.plan.placement import Bundle
from rlpost.roles import engine_roles, served_prm, teacher_roles, trainer_roles
from rlpost.trainers.base import RankTask
from rlpost.weight_sync.object_store import ObjectStoreTransport

# Measured on a CPU: the launched process with MLflow, Ray's daemons, the process of the rollouts.
BESIDE_ROLES = {"driver": 730 * MIB, "ray": 550 * MIB}
REWARD_PROCESS_BYTES = 50 * MIB
ROLLOUT = WorkerMemory({}, {"process": 430 * MIB}, on_gpu=False)
UNKNOWN = "unknown until the model is there"

Shapes = Mapping[str, ModelShape | None]
Workers = dict[str, tuple[WorkerMemory, ...]]


@dataclass(frozen=True)
class Load:
    """Bytes planned in one place, and which of them are certain."""

    planned: int
    certain: int

    def __add__(self, other: Load) -> Load:
        return Load(self.planned + other.planned, self.certain + other.certain)


@dataclass(frozen=True)
class MemoryPlan:
    """`workers` leaves out the roles named in `unknown`, so sums are then lower bounds.

    `hosts` by node, `devices` by (node, GPU).
    """

    workers: Workers
    unknown: dict[str, str]
    shared: dict[str, int]  # on the driver's node beside the roles
    object_store: int  # of `shared`, what lies in Ray's shared memory
    hosts: dict[int, Load] = field(default_factory=dict)
    devices: dict[tuple[int, int], Load] = field(default_factory=dict)


def memory_plan(
    config: RunConfig, shapes: Shapes, bundles: Sequence[Bundle], device_bytes: int | None
) -> MemoryPlan:
    """`device_bytes`: a GPU's whole memory, of which engines take a share; None: not known here."""
    workers = {**trainers(config, shapes), **engines(config, shapes, device_bytes)}
    unknown = {
        role: UNKNOWN if shapes.get(role) is None else "its class does not say"
        for role in (*trainer_roles(config), *engine_roles(config))
        if role not in workers
    }
    workers["rollout"] = (ROLLOUT,)
    staged = staged_bytes(config, shapes.get("actor"))
    shared = BESIDE_ROLES | ({"weights in the object store": staged} if staged else {})
    if processes := reward_processes(config):
        shared["reward processes"] = processes * REWARD_PROCESS_BYTES
    return MemoryPlan(
        workers,
        unknown,
        shared,
        staged,
        hosts=hosts(workers, bundles, shared, turns=colocated(config)),
        devices=devices(workers, bundles, turns=colocated(config), engines=engine_roles(config)),
    )


def colocated(config: RunConfig) -> bool:
    return bool(getattr(config.loop.config, "colocate", False))


def trainers(config: RunConfig, shapes: Shapes) -> Workers:
    """Of the roles whose model is known and whose trainer can tell."""
    found = {}
    for role, parts in trainer_roles(config).items():
        shape, trainer = shapes.get(role), parts.trainer.config
        if shape is not None and hasattr(trainer, "memory"):
            found[role] = tuple(
                trainer.memory(rank_task(config, role, parts, rank, shapes), head_of(parts.trainer))
                for rank in range(trainer.world_size)
            )
    return found


def head_of(section: Section) -> Any:
    return getattr(section.target, "head", "logits")


def rank_task(
    config: RunConfig, role: str, parts: RoleConfig, rank: int, shapes: Shapes
) -> RankTask:
    rollout, split, shape = config.rollout.config, splits(config)[role], shapes[role]
    assert shape is not None
    return RankTask(
        shape=shape,
        dtype=parts.model.config.dtype,
        rank=rank,
        trained=split.of_optimizer_step is not None,
        longest_tokens=rollout.max_prompt_tokens + rollout.max_response_tokens,
        num_samples=split.of_optimizer_step or split.of_batch,
        teacher=teacher_in_actor(config, shapes) if role == "actor" else None,
        exports=role == "actor" and config.weight_sync is not None,
    )


def teacher_in_actor(config: RunConfig, shapes: Shapes) -> ModelShape | None:
    if config.distillation is None or not build(config.distillation).in_actor:
        return None
    (teacher,) = teacher_roles(config)
    return shapes.get(teacher)


def engine_task(
    config: RunConfig, role: str, shape: ModelShape, device_bytes: int | None
) -> EngineTask:
    served = served_prm(config)
    model = served.model if served is not None and role == "prm" else config.model
    return EngineTask(
        shape=shape,
        dtype=model.config.dtype,
        max_model_len=model.config.max_length,
        head=head_of(engine_roles(config)[role]),
        device_bytes=device_bytes,
    )


def engines(config: RunConfig, shapes: Shapes, device_bytes: int | None) -> Workers:
    found = {}
    for role, section in engine_roles(config).items():
        shape = shapes.get(role)
        if shape is not None and hasattr(section.config, "memory"):
            one = section.config.memory(engine_task(config, role, shape, device_bytes))
            found[role] = (one,) * section.config.num_engines
    return found


def staged_bytes(config: RunConfig, actor: ModelShape | None) -> int:
    """Of the weights that wait in the object store while engines take them."""
    if (
        config.weight_sync is None
        or actor is None
        or not (engine_roles(config) and trainer_roles(config))
    ):
        return 0
    sync = config.weight_sync.config
    transport = getattr(sync, "transport", None)
    if transport is None or transport.target is not ObjectStoreTransport:
        return 0
    return actor.num_parameters() * DTYPE_BYTES[sync.dtype]


def reward_processes(config: RunConfig) -> int:
    """Of the pools of rewards and of step scores."""
    pools = (getattr(part.config, "pool", None) for part in (config.reward, config.prm) if part)
    return sum(pool.num_processes for pool in pools if pool is not None)


def hosts(
    workers: Workers, bundles: Sequence[Bundle], shared: Mapping[str, int], *, turns: bool
) -> dict[int, Load]:
    """Node -> load. The driver is on node 0; a trainer that moved out of a GPU is on its host."""
    loads = {0: Load(sum(shared.values()), 0)}
    for bundle, memory in with_memory(workers, bundles):
        certain = 0 if memory.on_gpu else memory.certain_bytes
        moved = memory.certain_bytes if memory.on_gpu and turns else 0
        load = Load(memory.host_bytes + moved, certain + moved)
        loads[bundle.node] = loads.get(bundle.node, Load(0, 0)) + load
    return loads


def devices(
    workers: Workers, bundles: Sequence[Bundle], *, turns: bool, engines: Mapping[str, Section]
) -> dict[tuple[int, int], Load]:
    """(node, GPU) -> load. Where roles take turns, of trainers or of engines, which is more."""
    sides: dict[tuple[int, int], dict[bool, Load]] = {}
    for bundle, memory in with_memory(workers, bundles):
        side = turns and bundle.role in engines
        for gpu in bundle.gpus:
            loads = sides.setdefault((bundle.node, gpu), {})
            load = Load(memory.device_bytes, memory.certain_bytes)
            loads[side] = loads.get(side, Load(0, 0)) + load
    return {
        place: Load(max(x.planned for x in loads.values()), max(x.certain for x in loads.values()))
        for place, loads in sorted(sides.items())
    }


def with_memory(
    workers: Workers, bundles: Sequence[Bundle]
) -> Iterator[tuple[Bundle, WorkerMemory]]:
    for bundle in bundles:
        if bundle.role in workers:
            yield bundle, workers[bundle.role][bundle.rank]
