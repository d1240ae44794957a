"""What this machine has, read from the system; needs no torch."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rlpost.memory import MIB

NVIDIA_SMI_TIMEOUT_S = 10.0
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True)
class Machine:
    """Bytes; None: not known here. `device_bytes` is the whole memory of the smallest GPU."""

    host_bytes: int | None
    available_bytes: int | None
    device_bytes: int | None
    free_disk_bytes: int | None


def this_machine(output_dir: Path, *, with_gpus: bool) -> Machine:
    """Within the limits of the container this process runs in; the disk is that of `output_dir`."""
    memory = meminfo(Path("/proc/meminfo"))
    total = memory.get("MemTotal")
    limits = [value for value in (total, container_limit()) if value is not None]
    return Machine(
        host_bytes=min(limits, default=None),
        available_bytes=memory.get("MemAvailable"),
        device_bytes=smallest_gpu() if with_gpus else None,
        free_disk_bytes=free_disk(output_dir),
    )


def meminfo(path: Path) -> dict[str, int]:
    """Bytes by name; empty where there is no such file."""
    if not path.is_file():
        return {}
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def container_limit() -> int | None:
    """Of the control group this process runs in; None without one."""
    for path in CGROUP_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdecimal():
            return int(text)
    return None


def smallest_gpu() -> int | None:
    """Of those that nvidia-smi lists; None where it is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return None
    sizes = [int(line) for line in done.stdout.split() if line.isdecimal()]
    return min(sizes) * MIB if sizes else None


def free_disk(folder: Path) -> int | None:
    """Where `folder` is, or will be."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), None)
    return None if there is None else shutil.disk_usage(there).free
