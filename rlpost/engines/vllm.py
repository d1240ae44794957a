"""The vLLM engine: rlpost's contract on top of one of two process layouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

from rlpost.engines.backend import WeightSource, manifest
from rlpost.engines.base import PauseMode, WakePart, WeightChunk, WeightFile
from rlpost.engines.jobs import Job, JobBook
from rlpost.engines.requests import (
    generation,
    prompt_logprobs,
    sampling_params,
    scoring_params,
    stop_token_ids,
)
from rlpost.engines.serving import ServedEngine, ServingConfig, started
from rlpost.engines.weight_set import check_complete, whole_fingerprints
from rlpost.errors import EngineError, WeightSyncError
from rlpost.models.shape import Head
from rlpost.types import Array, GenerateRequest, Generation


@dataclass(frozen=True)
class VllmEngineConfig(ServingConfig):
    """The keys of every engine."""


class VllmEngine(ServedEngine):
    """Engine (see rlpost.engines.base). Lives on one event loop; `role`, `rank` are for messages.

    A dead vLLM, or an exception in a step, fails all pending and later calls with EngineError.
    """

    Config = VllmEngineConfig
    head: ClassVar[Head] = "logits"

    def __init__(self, config: VllmEngineConfig, **model: Any) -> None:
        """`model`: see ServedEngine."""
        super().__init__(config, **model)
        self._book = JobBook(self._name)
        self._score_ids = count()
        self._stop_token_ids: list[int] = []
        self._shapes: dict[str, tuple[list[int], bool]] = {}
        self._paused = False
        self._broken = ""
        self._version = 0
        self._num_tokens = 0
        self._num_requests = 0
        self._num_cached = 0

    async def start(self) -> dict[str, float]:
        begun = time.monotonic()
        self._stop_token_ids = stop_token_ids(self._served.model_path)
        options = self._served.options(self.config)
        self._backend = await started(self.config, self._served, options)
        self._shapes = (await self._backend.rpc("rlpost_shapes"))[0]
        return {"start": time.monotonic() - begun}

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        jobs = [self._job(request) for request in requests]
        self._book.enter(jobs)
        try:
            await self._live.add(jobs)
        except BaseException:
            self._book.strike(jobs)  # nothing would ever answer them
            raise

    async def collect(self, request_ids: Sequence[str]) -> list[Generation]:
        outputs = await self._book.outputs(request_ids)
        results = [generation(name, output) for name, output in outputs.items()]
        self._num_requests += len(results)
        self._num_cached += sum(output.num_cached_tokens or 0 for output in outputs.values())
        self._num_tokens += sum(len(result.token_ids) for result in results)
        return results

    async def abort(self, request_ids: Sequence[str]) -> None:
        jobs = self._book.find(request_ids)
        await self._live.abort([job for job in jobs if not job.answer.done()])

    async def pause(self, mode: PauseMode) -> None:
        await self._live.pause(mode)
        self._paused = True

    async def resume(self) -> None:
        if self._broken:
            raise EngineError(f"{self._name} stays paused: {self._broken}; load a full set first")
        await self._live.resume()
        self._paused = False

    async def load_weights(self, chunks: Sequence[WeightChunk]) -> None:
        if not self._paused:
            raise WeightSyncError(f"{self._name}: weights are loaded while paused; pause() first")
        check_complete(self._name, self._shapes, self._served.dtype, chunks)
        sources = [await _source(chunk) for chunk in chunks]
        loads = [
            (manifest(chunk.specs), source) for chunk, source in zip(chunks, sources, strict=True)
        ]
        self._broken = "a weight update was not finished"
        try:
            await self._live.load(loads)
        except Exception as error:
            self._broken = f"a weight update failed: {error}"
            raise WeightSyncError(f"{self._name}: {self._broken}") from error
        self._broken = ""

    async def fingerprints(self, names: Sequence[str]) -> dict[str, int]:
        """Read back from the live parameters (experts: unpacked from what the kernels read)."""
        unknown = [name for name in names if name not in self._shapes]
        if unknown:
            raise WeightSyncError(f"{self._name} has no weights named {', '.join(unknown[:3])}")
        ranks = await self._live.rpc("rlpost_fingerprints", list(names))
        return whole_fingerprints(self._name, names, ranks)

    async def verify_kernels(self) -> list[str]:
        ranks = await self._live.rpc("rlpost_untrue_kernels")
        return sorted({name for names in ranks for name in names})

    async def commit(self, version: int) -> None:
        if self._broken:
            raise EngineError(f"{self._name} can't commit version {version}: {self._broken}")
        if version < self._version:
            raise EngineError(
                f"{self._name}: version {version} is older than {self._version}; versions only grow"
            )
        await self._live.commit(version)
        self._version = version

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        loop = asyncio.get_running_loop()
        params = scoring_params()
        jobs = []
        for sequence in sequences:
            self._check_length("a sequence to score", len(sequence))
            name = f"score/{next(self._score_ids)}"
            jobs.append(Job(name, list(sequence), params, loop.create_future()))
        await self._live.add(jobs)
        return [prompt_logprobs(await job.answer) for job in jobs]

    async def sleep(self) -> None:
        """On a CPU vLLM can't free memory; the prefix cache is dropped."""
        await self._live.sleep()

    async def wake(self, part: WakePart | None = None) -> None:
        """The KV cache comes back empty; vLLM resumes by itself once all is there."""
        await self._live.wake(part)
        if self._paused:
            await self._live.pause("keep")

    async def stats(self) -> dict[str, float]:
        """Counts since the start; `cached_tokens`: prompt tokens served from the prefix cache."""
        return {
            "pending_requests": float(self._book.num_pending()),
            "finished_requests": float(self._num_requests),
            "generated_tokens": float(self._num_tokens),
            "cached_tokens": float(self._num_cached),
            "policy_version": float(self._version),
        }

    def _job(self, request: GenerateRequest) -> Job:
        self._check_length(f"request {request.request_id!r}", len(request.token_ids))
        future = asyncio.get_running_loop().create_future()
        params = sampling_params(request, self._stop_token_ids)
        return Job(request.request_id, list(request.token_ids), params, future)

    def _check_length(self, what: str, length: int) -> None:
        limit = self._served.max_model_len
        if not 0 < length < limit:
            raise EngineError(
                f"{self._name}: {what} has {length} tokens; 1 to {limit - 1} are possible "
                f"(max_model_len {limit} less one sampled token)"
            )


async def _source(chunk: WeightChunk) -> WeightSource:
    """Where the worker reads a chunk's bytes: an array, or the path of a file."""
    from rlpost.cluster.store import fetch

    if isinstance(chunk.buffer, WeightFile):
        return chunk.buffer.path
    array: Array = await asyncio.to_thread(fetch, chunk.buffer)
    return array
