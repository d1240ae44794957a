"""What workers take of a machine's memory: planned part by part, and read from the system."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Parts that follow exactly from the configuration; the others are estimates.
CERTAIN = ("weights", "gradients", "optimizer", "kv_cache")


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes of one worker. `parts` lie on each of its GPUs if it has any, else on the host.

    `host_parts` lie on the host in any case: the process itself with its libraries.
    """

    parts: Mapping[str, int]
    host_parts: Mapping[str, int]
    on_gpu: bool

    @property
    def device_bytes(self) -> int:
        """On each GPU of the worker."""
        return sum(self.parts.values()) if self.on_gpu else 0

    @property
    def host_bytes(self) -> int:
        return sum(self.host_parts.values()) + (0 if self.on_gpu else sum(self.parts.values()))

    @property
    def certain_bytes(self) -> int:
        """Of `parts`, without estimates."""
        return sum(self.parts.get(name, 0) for name in CERTAIN)


def process_memory() -> dict[str, float]:
    """`rss_bytes` and `rss_peak_bytes` of this process."""
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return {
        "rss_bytes": float(pages * os.sysconf("SC_PAGE_SIZE")),
        "rss_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
    }


def children_memory() -> float:
    """Resident bytes of all processes below this one."""
    return float(sum(map(_resident, _below(os.getpid()))))


def _below(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(child) for child in task.read_text().split()]
        except OSError:  # the thread has ended
            continue
    return children + [lower for child in children for lower in _below(child)]


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # it has ended
        return 0


def size(num_bytes: float) -> str:
    """`1.5 GiB`, `48 MiB`, `512 B`."""
    for unit, bits in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        amount = num_bytes / (1 << bits)
        if amount >= 1:
            return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:.0f} {unit}"
    return f"{num_bytes:.0f} B"
