"""Requests that an engine has taken on, from submit to the one hand-out of their result."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.errors import EngineError


@dataclass(eq=False)
class Job:
    """One request inside an engine. `answer` gets vLLM's final RequestOutput, or an EngineError."""

    request_id: str
    token_ids: list[int]
    params: Any  # vllm.SamplingParams
    answer: asyncio.Future[Any]

    def finish(self, output: Any) -> None:
        if not self.answer.done():
            self.answer.set_result(output)

    def fail(self, error: EngineError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # read: nobody may ever collect it


class JobBook:
    """Jobs by request id. `name` of the engine is used in messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: dict[str, Job] = {}

    def enter(self, jobs: Sequence[Job]) -> None:
        """Raises EngineError, entering none, if an id is still here or stands twice."""
        counts = Counter(job.request_id for job in jobs)
        for name, times in counts.items():
            if times > 1 or name in self._jobs:
                raise EngineError(f"{self._name}: request {name!r} was submitted twice")
        self._jobs |= {job.request_id: job for job in jobs}

    def strike(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._jobs.pop(job.request_id, None)

    def find(self, request_ids: Sequence[str]) -> list[Job]:
        unknown = [name for name in request_ids if name not in self._jobs]
        if unknown:
            raise EngineError(
                f"{self._name} has no request {unknown[0]!r}, or handed its result out before"
            )
        return [self._jobs[name] for name in request_ids]

    async def outputs(self, request_ids: Sequence[str]) -> Mapping[str, Any]:
        """Waits, then hands out vLLM's outputs. If a job failed, raises its error and keeps the
        others; a caller that gives up waiting loses nothing."""
        jobs = self.find(request_ids)
        if jobs:
            answers = {job.answer for job in jobs}
            await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
        failed = [job for job in jobs if job.answer.done() and job.answer.exception()]
        self.strike(failed or jobs)
        if failed:
            raise EngineError(str(failed[0].answer.exception()))
        return {job.request_id: job.answer.result() for job in jobs}

    def num_pending(self) -> int:
        return sum(not job.answer.done() for job in self._jobs.values())
