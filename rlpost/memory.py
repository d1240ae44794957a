"""What workers take of a machine's memory: planned part by part, and read from the system."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20  # bytes
# Parts that follow exactly from the configuration; the others are estimates.
HELD = ("weights", "gradients", "optimizer")
CERTAIN = (*HELD, "kv_cache")


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
    """Of this process: `rss_bytes`, its peak, and `pss_bytes`.

    `pss_bytes` counts a page that n processes share as 1/n.
    """
    return {
        "rss_bytes": float(_resident(os.getpid())),
        "rss_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        "pss_bytes": float(_proportional(os.getpid())),
    }


def family_memory() -> dict[str, float]:
    """The same with all processes below this one, each at its own peak."""
    readings = process_memory()
    for pid in _below(os.getpid()):
        readings["rss_bytes"] += _resident(pid)
        readings["rss_peak_bytes"] += max(_peak(pid), _resident(pid))
        readings["pss_bytes"] += _proportional(pid)
    return readings


def _below(pid: int) -> list[int]:
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in _text(task).split()
    ]
    return children + [lower for child in children for lower in _below(child)]


def _resident(pid: int) -> int:
    words = _text(Path(f"/proc/{pid}/statm")).split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if words else 0


def _proportional(pid: int) -> int:
    return _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")


def _peak(pid: int) -> int:
    return _kilobytes(Path(f"/proc/{pid}/status"), "VmHWM:")


def _kilobytes(path: Path, name: str) -> int:
    """Bytes that a file of /proc gives in kB."""
    found = [line.split()[1] for line in _text(path).splitlines() if line.startswith(name)]
    return int(found[0]) * 1024 if found else 0


def _text(path: Path) -> str:
    """Of a file of /proc; empty when its process has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


def size(num_bytes: float) -> str:
    """`1.5 GiB`, `48 MiB`, `512 B`."""
    for unit, bits in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        amount = num_bytes / (1 << bits)
        if amount >= 1:
            return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:.0f} {unit}"
    return f"{num_bytes:.0f} B"
