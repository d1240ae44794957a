"""vLLM in this process: LLMEngine stepped by one thread. The cheapest layout on a CPU.

The thread owns vLLM. Everything else reaches it as a command (a function), and commands run
between steps, so weights never change inside a step and a submit is never cut in two.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rlpost.engines.backend import Manifest, WeightSource
from rlpost.engines.base import PauseMode, WakePart
from rlpost.engines.jobs import Job
from rlpost.errors import EngineError

IDLE_WAIT_S = 0.5  # the thread is woken by commands; this only bounds a lost wake-up
STOP_WAIT_S = 30.0
Command = tuple[Callable[[], Any], "concurrent.futures.Future[Any]"]


class InProcess:
    """Backend. `options` are EngineArgs; `name` is used in messages.

    Thread `engine`: consumes commands, produces answers (handed to the event loop); woken by
    `_wake`; ended by shutdown() or by an exception in a step, which fails all that is pending.
    """

    def __init__(self, options: dict[str, Any], *, name: str) -> None:
        # One thread both schedules and computes, so there is nothing to overlap; without overlap
        # a pause has no half-finished step that would mix two policy versions.
        self._options = {**options, "async_scheduling": False}
        self._name = name
        self._commands: deque[Command] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._jobs: dict[str, Job] = {}
        self._draining: list[concurrent.futures.Future[None]] = []
        self._stop = False
        self._failure: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: Any = None
        self._core: Any = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        started = self._enqueue(self._build)
        self._thread.start()
        await asyncio.wrap_future(started)

    async def add(self, jobs: Sequence[Job]) -> None:
        await self._call(lambda: self._add(jobs))

    async def abort(self, jobs: Sequence[Job]) -> None:
        await self._call(lambda: self._abort(jobs))

    async def pause(self, mode: PauseMode) -> None:
        if mode == "keep":
            await self._call(self._freeze)
        else:
            await asyncio.wrap_future(await self._call(self._begin_drain))

    async def resume(self) -> None:
        await self._call(self._resume)

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        return list(await self._call(lambda: self._engine.collective_rpc(method, args=args)))

    async def load(self, chunks: Sequence[tuple[Manifest, WeightSource]]) -> None:
        await self.rpc("rlpost_load", list(chunks))

    async def commit(self, version: int) -> None:
        def run() -> None:
            self._core.set_weight_version(str(version))
            self._core.reset_prefix_cache(reset_running_requests=True)

        await self._call(run)

    async def sleep(self) -> None:
        await self._call(lambda: self._core.sleep(1, "keep"))

    async def wake(self, part: WakePart | None) -> None:
        await self._call(lambda: self._core.wake_up([part] if part else None))

    async def shutdown(self) -> None:
        with self._lock:
            self._stop = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_WAIT_S)

    # --- the thread ---

    def _run(self) -> None:
        try:
            while not self._stop:
                self._run_commands()
                if not self._step():
                    self._wake.wait(IDLE_WAIT_S)
                    self._wake.clear()
            self._fail("it was shut down")
        except BaseException as error:  # anything a step raises ends the engine, and is reported
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._close()

    def _run_commands(self) -> None:
        while self._commands:
            function, future = self._commands.popleft()
            try:
                future.set_result(function())
            except Exception as error:  # belongs to the caller of the command
                future.set_exception(error)

    def _step(self) -> bool:
        """True if there was something to do."""
        if self._engine is None or not self._core.scheduler.has_requests():
            for future in self._draining:
                future.set_result(None)
            self._draining.clear()
            return False
        for output in self._engine.step():
            if output.finished:
                self._deliver(output)
        return True

    def _deliver(self, output: Any) -> None:
        job = self._jobs.pop(output.request_id, None)
        if job is not None:
            self._to_loop(job.finish, output)

    def _to_loop(self, function: Callable[[Any], None], value: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, value)

    def _fail(self, cause: str) -> None:
        error = EngineError(f"{self._name} died: {cause}")
        with self._lock:
            self._failure = str(error)
            commands = list(self._commands)
            self._commands.clear()
        futures = [future for _, future in commands] + self._draining
        for future in futures:
            future.set_exception(error)
        for job in self._jobs.values():
            self._to_loop(job.fail, error)
        self._jobs.clear()

    def _close(self) -> None:
        if self._core is not None:
            self._core.shutdown()

    # --- commands ---

    async def _call(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._enqueue(function))

    def _enqueue(self, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # a caller that gives up can't cancel half a command
        with self._lock:
            if self._failure is not None:
                raise EngineError(self._failure)
            self._commands.append((function, future))
        self._wake.set()
        return future

    def _build(self) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine = LLMEngine.from_engine_args(EngineArgs(**self._options))
        self._core = self._engine.engine_core.engine_core
        self._core.set_weight_version("0")

    def _add(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._jobs[job.request_id] = job
            try:
                self._engine.add_request(
                    job.request_id, {"prompt_token_ids": job.token_ids}, job.params
                )
            except Exception as error:  # this request's own fault; the others are queued
                del self._jobs[job.request_id]
                self._to_loop(job.fail, EngineError(f"request {job.request_id!r}: {error}"))

    def _abort(self, jobs: Sequence[Job]) -> None:
        processor = self._engine.output_processor
        for job in jobs:
            # LLMEngine drops the partial output of an aborted request unless it has a queue.
            for internal_id in processor.external_req_ids.get(job.request_id, []):
                processor.request_states[internal_id].queue = _Outlet(self._deliver)
        self._engine.abort_request([job.request_id for job in jobs])

    def _freeze(self) -> None:
        self._core.pause_scheduler(mode="keep", clear_cache=False)

    def _begin_drain(self) -> concurrent.futures.Future[None]:
        """Running requests go on, waiting ones stay; done when `_step` finds nothing to do."""
        from vllm.v1.core.sched.interface import PauseState

        self._core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        self._draining.append(future)
        return future

    def _resume(self) -> None:
        for future in self._draining:
            future.set_exception(EngineError(f"{self._name}: resumed before it was drained"))
        self._draining.clear()
        self._core.resume_scheduler()


class _Outlet:
    """Stands for the output queue of an aborted request."""

    def __init__(self, put: Callable[[Any], None]) -> None:
        self.put = put
