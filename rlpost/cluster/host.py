"""What runs inside a worker process: it hosts one plain object and forwards calls to it."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlpost.cluster.rendezvous import Rendezvous
from rlpost.profiling import ProfileConfig, TorchProfiler


class Host:
    """Creates `target(*args, **kwargs)` and calls its methods.

    Plain methods run one at a time in a single thread (process groups and autograd want one);
    coroutines run on the event loop. Either way the process still answers `pid`.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str],
        cores: Sequence[int],
        log_path: str,
        folder: str,
        import_paths: Sequence[str],
    ) -> None:
        os.chdir(folder)  # relative paths mean what they mean in the driver, on every node
        sys.path += [path for path in import_paths if path not in sys.path]
        os.environ.update(env)
        if cores:
            os.sched_setaffinity(0, cores)
        _redirect_output(Path(log_path))
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._object: Any = None
        self._profiler: TorchProfiler | None = None

    async def pid(self) -> int:
        return os.getpid()

    async def rendezvous(self) -> Rendezvous:
        """At the address of this node, with this process as rank 0."""
        import ray

        return Rendezvous.listening(str(ray.util.get_node_ip_address()))

    async def create(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        self._object = await loop.run_in_executor(self._thread, lambda: target(*args, **kwargs))

    async def start_profile(self, config: ProfileConfig) -> None:
        """From now on, in the thread of the plain methods."""
        loop = asyncio.get_running_loop()
        self._profiler = await loop.run_in_executor(self._thread, lambda: TorchProfiler(config))

    async def stop_profile(self, trace: Path) -> dict[str, int]:
        """Writes the trace; returns peaks of memory, in bytes."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise ValueError("this process records no profile: start_profile() comes first")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: profiler.stop(trace))

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        function = getattr(self._object, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))


def _redirect_output(path: Path) -> None:
    """Libraries print to the process's own log file, not into the user's progress view."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
