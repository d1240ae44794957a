"""torch's profiler in one process: a Chrome trace of some steps, and what memory they took."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from rlpost.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class ProfileConfig:
    """`first_step` counts from 1."""

    first_step: PositiveInt
    num_steps: PositiveInt
    record_shapes: bool
    with_stack: bool
    profile_memory: bool
    artifacts: bool

    @property
    def last_step(self) -> int:
        return self.first_step + self.num_steps - 1


class TorchProfiler:
    """Records all threads of the process: CPU work, and CUDA work where there is a GPU."""

    def __init__(self, config: ProfileConfig) -> None:
        from torch._C._profiler import _ExperimentalConfig  # the public way covers one thread

        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.reset_peak_memory_stats()
        self._profiler = torch.profiler.profile(
            activities=kinds,
            record_shapes=config.record_shapes,
            with_stack=config.with_stack,
            profile_memory=config.profile_memory,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.start()

    def stop(self, trace: Path) -> dict[str, int]:
        """Writes the trace (.json.gz) and returns the memory in bytes."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.stop()
        trace.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(trace))
        return memory_bytes()


def memory_bytes() -> dict[str, int]:
    """The process's own peak, and torch's on its GPU."""
    # Linux gives kilobytes.
    peaks = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        peaks["gpu_allocated"] = torch.cuda.max_memory_allocated()
        peaks["gpu_reserved"] = torch.cuda.max_memory_reserved()
    return peaks


def memory_table(peaks: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each process, in MiB."""
    columns = list(dict.fromkeys(name for row in peaks.values() for name in row))
    lines = ["".join(f"{title:>16}" for title in ("MiB, at most", *columns))]
    for name, row in peaks.items():
        cells = [f"{row[column] / 2**20:.0f}" if column in row else "-" for column in columns]
        lines.append("".join(f"{cell:>16}" for cell in (name, *cells)))
    return "\n".join(lines) + "\n"
