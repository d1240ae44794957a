"""The contract of a process layout: where vLLM's loop runs and how commands reach it.

`inprocess.InProcess` steps vLLM in a thread of this process; `async_llm.OwnProcesses` talks to
vLLM's own processes. rlpost.engines.vllm.VllmEngine is the same on top of either.
Every method raises EngineError once vLLM has died, and so does every unfinished job; none hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Protocol

from rlpost.engines.base import PauseMode, TensorSpec, WakePart
from rlpost.engines.jobs import Job
from rlpost.types import Array

Manifest = list[tuple[str, str, tuple[int, ...], int]]  # name, dtype, shape, byte offset
WeightSource = Array | str  # the bytes, or the path of a safetensors file


class Backend(Protocol):
    async def start(self) -> None: ...

    async def add(self, jobs: Sequence[Job]) -> None:
        """Queues all, in order, before the next step."""

    async def abort(self, jobs: Sequence[Job]) -> None:
        """Finishes each with its partial output, finish_reason "abort"."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a WorkerExtension method on every rank, between steps; results in rank order."""

    async def load(self, chunks: Sequence[tuple[Manifest, WeightSource]]) -> None:
        """Loads Hugging Face tensors on every rank, then rebuilds what is derived from them."""

    async def commit(self, version: int) -> None:
        """Labels tokens from now on; drops the prefix cache; running requests are recomputed."""

    async def sleep(self) -> None: ...

    async def wake(self, part: WakePart | None) -> None: ...

    async def shutdown(self) -> None: ...


def manifest(specs: Sequence[TensorSpec]) -> Manifest:
    return [(spec.name, spec.dtype, tuple(spec.shape), spec.offset) for spec in specs]


def shared_memory_dir() -> Path:
    """A folder in RAM where the system has one."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(gettempdir())
