"""A weight update as a transaction: all engines serve the new version, or the push fails loudly."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat

from rlpost.engines.base import WeightChunk
from rlpost.errors import RlpostError, WeightSyncError
from rlpost.validation import Section

if TYPE_CHECKING:
    from rlpost.cluster.workers import Worker, WorkerGroup
    from rlpost.weight_sync.base import Transport

Step = Callable[[], Awaitable[None]]
SHOWN = 5  # names listed in a message


@dataclass(frozen=True)
class WeightSyncConfig:
    """`verify`: every push is compared on a rotating share of the tensors, on all, or not at all.

    `pause`: keep freezes running requests and goes on with them under the new weights; drain lets
    them finish under the old ones.
    """

    transport: Section
    dtype: Literal["float32", "bfloat16", "float16"]
    pause: Literal["keep", "drain"]
    verify: Literal["rotating", "full", "none"]
    verify_fraction: Annotated[float, Field(gt=0, le=1)]
    prepare_deadline_s: PositiveFloat
    pause_deadline_s: PositiveFloat
    transfer_deadline_s: PositiveFloat
    verify_deadline_s: PositiveFloat
    commit_deadline_s: PositiveFloat


@dataclass
class Push:
    """One transaction under way. An engine in `touched` holds weights that are not committed."""

    version: int
    trainer: WorkerGroup
    engines: list[Worker]
    full: bool
    chunks: list[WeightChunk] = field(default_factory=list)
    paused: set[Worker] = field(default_factory=set)
    touched: set[Worker] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)


class WeightSync:
    """Pushes policy versions from the actor to the engines, one push at a time."""

    Config = WeightSyncConfig

    def __init__(self, config: WeightSyncConfig) -> None:
        self.config = config
        self.transport: Transport = config.transport.target(config.transport.config)
        self._next_verified = 0

    async def push(
        self,
        version: int,
        trainer: WorkerGroup,
        engines: list[Worker],
        *,
        full: bool,
        on_prepared: Step | None = None,
        on_loaded: Step | None = None,
    ) -> dict[str, float]:
        """Returns seconds per phase. `full` compares all tensors and what the kernels use.

        `on_prepared` runs when the trainer's weights are staged and no longer needed on its
        devices, `on_loaded` when the engines hold them and before they generate: where both share
        devices, the trainer leaves and the engines' weights come in at the first, their KV cache
        at the second.

        Raises WeightSyncError naming version, phase, engine and tensors. Then engines that still
        hold the old version (or already committed the new one) go on; an engine left with
        uncommitted weights stays paused and is named.
        """
        push = Push(version, trainer, engines, full)
        started = time.monotonic()
        try:
            await self._prepare(push)
            await self._step(push, "handover", on_prepared)
            await self._pause(push)
            await self._transfer(push)
            await self._verify(push)
            await self._step(push, "wake", on_loaded)
            await self._commit(push)
            await self._resume(push)
        except BaseException as error:
            fenced = await self._recover(push)
            if isinstance(error, WeightSyncError) and fenced:
                raise WeightSyncError(f"{error}; left paused: {fenced}") from error
            raise
        finally:
            await self.transport.release(push.chunks)
        return {**push.seconds, "total": time.monotonic() - started}

    async def _prepare(self, push: Push) -> None:
        with timed(push, "prepare"):
            try:
                push.chunks = await self.transport.prepare(
                    push.trainer,
                    dtype=self.config.dtype,
                    deadline_s=self.config.prepare_deadline_s,
                )
            except RlpostError as error:
                raise WeightSyncError(
                    f"version {push.version}: prepare failed on {push.trainer.role}: {error}"
                ) from error

    async def _step(self, push: Push, name: str, step: Step | None) -> None:
        if step is not None:
            with timed(push, name):
                await step()

    async def _pause(self, push: Push) -> None:
        async def pause(engine: Worker) -> None:
            # Counted as paused even if the answer is lost: a resume too many does no harm.
            push.paused.add(engine)
            await engine.call("pause", self.config.pause, deadline_s=self.config.pause_deadline_s)

        await self._on_engines(push, "pause", pause)

    async def _transfer(self, push: Push) -> None:
        async def transfer(engine: Worker) -> None:
            push.touched.add(engine)
            await self.transport.transfer(
                push.chunks, engine, deadline_s=self.config.transfer_deadline_s
            )

        await self._on_engines(push, "transfer", transfer)

    async def _verify(self, push: Push) -> None:
        sent = {name: value for chunk in push.chunks for name, value in chunk.fingerprints.items()}
        names_sent = {spec.name for chunk in push.chunks for spec in chunk.specs}
        assert names_sent == set(sent), (
            f"no fingerprints of {sorted(names_sent ^ set(sent))[:SHOWN]}"
        )
        names = self._names_to_verify(sorted(sent), full=push.full)

        async def verify(engine: Worker) -> None:
            deadline_s = self.config.verify_deadline_s
            found = await engine.call("fingerprints", names, deadline_s=deadline_s)
            wrong = [name for name in names if found.get(name) != sent[name]]
            if push.full:
                wrong += await engine.call("verify_kernels", deadline_s=deadline_s)
            if wrong:
                more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
                raise WeightSyncError(f"weights differ: {', '.join(wrong[:SHOWN])}{more}")

        if names:
            await self._on_engines(push, "verify", verify)

    async def _commit(self, push: Push) -> None:
        async def commit(engine: Worker) -> None:
            await engine.call("commit", push.version, deadline_s=self.config.commit_deadline_s)
            push.touched.discard(engine)

        await self._on_engines(push, "commit", commit)

    async def _resume(self, push: Push) -> None:
        async def resume(engine: Worker) -> None:
            await engine.call("resume", deadline_s=self.config.commit_deadline_s)
            push.paused.discard(engine)

        await self._on_engines(push, "resume", resume)

    async def _recover(self, push: Push) -> str:
        """Resumes the engines whose weights are whole; names those that stay paused."""
        for engine in push.paused - push.touched:
            # An engine that can't even resume is dead; the push fails with the first error.
            with contextlib.suppress(RlpostError):
                await engine.call("resume", deadline_s=self.config.commit_deadline_s)
        return ", ".join(sorted(map(repr, push.touched)))

    async def _on_engines(
        self, push: Push, phase: str, action: Callable[[Worker], Awaitable[None]]
    ) -> None:
        """The phase on all engines at once. Waits for all, then raises the first failure."""
        with timed(push, phase):
            results = await asyncio.gather(*map(action, push.engines), return_exceptions=True)
        for engine, error in zip(push.engines, results, strict=True):
            if isinstance(error, RlpostError):
                raise WeightSyncError(
                    f"version {push.version}: {phase} failed on {engine!r}: {error}"
                ) from error
            if error is not None:
                raise error

    def _names_to_verify(self, names: Sequence[str], *, full: bool) -> list[str]:
        """All names, or the next share of them in turn, so that all are seen again and again."""
        if self.config.verify == "none":
            return []
        if full or self.config.verify == "full":
            return list(names)
        share = math.ceil(self.config.verify_fraction * len(names))
        chosen = [names[(self._next_verified + step) % len(names)] for step in range(share)]
        self._next_verified = (self._next_verified + share) % len(names)
        return chosen


@contextlib.contextmanager
def timed(push: Push, phase: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        push.seconds[phase] = time.monotonic() - started
