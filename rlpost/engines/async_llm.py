"""vLLM in its own processes: AsyncLLM, with one worker per GPU. The layout for GPUs and for TP > 1.

Weights reach the workers through files in shared memory, because vLLM's processes do not take part
in the object store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlpost.engines.backend import Manifest, WeightSource, shared_memory_dir
from rlpost.engines.base import PauseMode, WakePart
from rlpost.engines.jobs import Job
from rlpost.errors import EngineError

PROBE_S = 0.25  # how soon a dead vLLM process is noticed by calls that wait for it
SHARED_FILES = "rlpost_shared_files"


class OwnProcesses:
    """Backend. `options` are AsyncEngineArgs; `name` is used in messages.

    Task per job `_follow`: consumes vLLM's outputs, produces the job's answer; ends with it.
    Task `_watch`: sets `_dead` when vLLM's processes end, which wakes whoever waits for them.
    Both are cancelled by shutdown().
    """

    def __init__(self, options: dict[str, Any], *, name: str) -> None:
        self._options = options
        self._name = name
        self._engine: Any = None
        self._shared_files: set[str] = set()
        self._paused = False
        self._gate = asyncio.Lock()  # a submit's own short pause must not end a pause of the caller
        self._tasks: set[asyncio.Task[None]] = set()
        self._dead: asyncio.Future[None] | None = None

    async def start(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**self._options)
        self._engine = await asyncio.to_thread(AsyncLLM.from_engine_args, arguments)
        self._dead = asyncio.get_running_loop().create_future()
        self._spawn(self._watch(self._engine, self._dead))
        await self._await(self._live.update_weight_version("0"))
        self._shared_files = {path for found in await self.rpc(SHARED_FILES) for path in found}

    async def add(self, jobs: Sequence[Job]) -> None:
        async with self._held():
            for job in jobs:
                await self._add_one(job)

    async def abort(self, jobs: Sequence[Job]) -> None:
        await self._await(self._live.abort([job.request_id for job in jobs]))

    async def pause(self, mode: PauseMode) -> None:
        async with self._gate:
            self._paused = True
        # Outside the gate: a drain takes long, and submits and a resume must get through.
        how = "keep" if mode == "keep" else "wait"
        await self._await(self._live.pause_generation(mode=how, clear_cache=False))

    async def resume(self) -> None:
        async with self._gate:
            await self._await(self._live.resume_generation())
            self._paused = False

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        return list(await self._await(self._live.collective_rpc(method, args=args)))

    async def load(self, chunks: Sequence[tuple[Manifest, WeightSource]]) -> None:
        with TemporaryDirectory(prefix="rlpost-weights-", dir=shared_memory_dir()) as folder:
            staged = []
            for index, (manifest, source) in enumerate(chunks):
                path = source if isinstance(source, str) else f"{folder}/{index}.bin"
                if not isinstance(source, str):
                    await asyncio.to_thread(source.tofile, path)
                staged.append((manifest, path))
            await self.rpc("rlpost_load", staged)

    async def commit(self, version: int) -> None:
        await self._await(self._live.update_weight_version(str(version)))
        await self._await(self._live.reset_prefix_cache(reset_running_requests=True))

    async def sleep(self) -> None:
        async with self._gate:
            await self._await(self._live.sleep(1, "keep"))

    async def wake(self, part: WakePart | None) -> None:
        async with self._gate:
            await self._await(self._live.wake_up([part] if part else None))

    async def shutdown(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await asyncio.to_thread(engine.shutdown)
        for path in self._shared_files:
            Path(path).unlink(missing_ok=True)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _live(self) -> Any:
        if self._engine is None:
            raise EngineError(f"{self._name} was shut down")
        return self._engine

    @contextlib.asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        """No step is taken inside; goes on afterwards unless the caller had paused before."""
        async with self._gate:
            core = self._live.engine_core
            if not self._paused:
                await self._await(core.pause_scheduler_async(mode="keep", clear_cache=False))
            try:
                yield
            finally:
                if not self._paused:
                    await self._await(core.resume_scheduler_async())

    async def _add_one(self, job: Job) -> None:
        prompt = {"prompt_token_ids": job.token_ids}
        try:
            outputs = await self._live.add_request(job.request_id, prompt, job.params)
        except Exception as error:  # this request's own fault, or vLLM is gone
            job.fail(EngineError(f"{self._name}: request {job.request_id!r}: {error}"))
            return
        self._spawn(self._follow(job, outputs))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, job: Job, outputs: Any) -> None:
        try:
            output = await self._await(outputs.get())
            while not output.finished:
                output = await self._await(outputs.get())
            job.finish(output)
        except EngineError as error:
            job.fail(error)
        except asyncio.CancelledError:
            job.fail(EngineError(f"{self._name} was shut down"))
            raise

    async def _watch(self, engine: Any, dead: asyncio.Future[None]) -> None:
        while not engine.errored:
            await asyncio.sleep(PROBE_S)
        dead.set_result(None)

    async def _await(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The call's result; EngineError as soon as vLLM is dead, even if the call never ends."""
        from vllm.v1.engine.exceptions import EngineDeadError

        assert self._dead is not None, "start() comes first"
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, self._dead}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineError(f"{self._name} died: vLLM's engine process ended")
            return task.result()
        except EngineDeadError as error:
            raise EngineError(f"{self._name} died: {error}") from error
        finally:
            task.cancel()
