"""Planned against measured memory, once, after the first step of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost.cluster.workers import gather
from rlpost.memory import HELD, WorkerMemory

if TYPE_CHECKING:
    from rlpost.cluster.workers import Worker

DEADLINE_S = 60.0
# Of a GPU's memory by torch; and before the first checkpoint.
NOT_COUNTED = ("context", "save")


@dataclass(frozen=True)
class MemoryReport:
    """`planned` and `workers` by role; a role whose size was not known is not in `planned`.

    `on_gpu`: roles whose memory is that of their GPUs.
    """

    planned: Mapping[str, Sequence[WorkerMemory]]
    workers: Mapping[str, Sequence[Worker]]
    on_gpu: frozenset[str]

    async def measure(self) -> dict[str, float]:
        """Sums over a role's workers: `memory/<role>/planned_bytes`, `.../measured_bytes`.

        For trainers also `planned_held_bytes` and `measured_held_bytes`, of the tensors that stay:
        weights, gradients, optimizer.
        """
        roles = [role for role, workers in self.workers.items() if workers]
        readings = await gather(
            gather(worker.call("memory", deadline_s=DEADLINE_S) for worker in self.workers[role])
            for role in roles
        )
        metrics: dict[str, float] = {}
        for role, of_role in zip(roles, readings, strict=True):
            metrics |= self._of_role(role, of_role)
        return metrics

    def _of_role(self, role: str, readings: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
        planned, on_gpu = self.planned.get(role, ()), role in self.on_gpu
        found = {
            "measured_bytes": sum(measured(reading, on_gpu=on_gpu) for reading in readings),
            "measured_held_bytes": sum(map(held, readings)),
        }
        if planned:
            found["planned_bytes"] = sum(map(taken, planned))
            found["planned_held_bytes"] = sum(sum(w.parts.get(p, 0) for p in HELD) for w in planned)
        if not found["measured_held_bytes"]:  # an engine does not say
            found = {name: value for name, value in found.items() if "held" not in name}
        return {f"memory/{role}/{name}": float(value) for name, value in found.items() if value}


def taken(worker: WorkerMemory) -> int:
    """What `measured` can see of it."""
    parts = worker.parts if worker.on_gpu else {**worker.parts, **worker.host_parts}
    return sum(value for name, value in parts.items() if name not in NOT_COUNTED)


def measured(reading: Mapping[str, float], *, on_gpu: bool) -> float:
    """At the peak; 0 if the worker does not say. Pages that processes share are divided by them."""
    if on_gpu:
        return reading.get("device_peak_bytes", 0.0)
    return reading["pss_bytes"] + max(0.0, reading["rss_peak_bytes"] - reading["rss_bytes"])


def held(reading: Mapping[str, float]) -> float:
    return sum(reading.get(f"{part}_bytes", 0.0) for part in HELD)
