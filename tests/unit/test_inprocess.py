"""The engine thread: what it fails, it fails loudly and for everyone who waits."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.engines.inprocess import InProcess
from rlpost.engines.jobs import Job
from rlpost.errors import EngineError


class StubVllm:
    """Accepts requests; a step raises once `broken` is set."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.broken = False

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        if not prompt["prompt_token_ids"]:
            raise ValueError("empty prompt")
        self.added.append(request_id)

    def step(self) -> list[Any]:
        if self.broken:
            raise RuntimeError("kernel exploded")
        return []


class StubCore:
    def __init__(self, vllm: StubVllm) -> None:
        self.scheduler = SimpleNamespace(has_requests=lambda: bool(vllm.added))
        self.closed = False

    def shutdown(self) -> None:
        self.closed = True


class StubInProcess(InProcess):
    def _build(self) -> None:
        self._engine = StubVllm()
        self._core = StubCore(self._engine)


def job(name: str, tokens: list[int]) -> Job:
    return Job(name, tokens, None, asyncio.get_running_loop().create_future())


@pytest.fixture
async def backend() -> InProcess:
    backend = StubInProcess({}, name="engine[3]")
    await backend.start()
    return backend


async def test_a_crashed_step_fails_pending_and_later_calls(backend: Any) -> None:
    waiting = job("a", [1])
    await backend.add([waiting])
    backend._engine.broken = True
    with pytest.raises(EngineError, match=r"engine\[3\] died: RuntimeError: kernel exploded"):
        await asyncio.wait_for(waiting.answer, 5)
    with pytest.raises(EngineError, match="kernel exploded"):
        await backend.add([job("b", [1])])


async def test_one_bad_request_fails_alone(backend: Any) -> None:
    bad, good = job("bad", []), job("good", [1])
    await backend.add([bad, good])
    with pytest.raises(EngineError, match="'bad': empty prompt"):
        await asyncio.wait_for(bad.answer, 5)
    assert backend._engine.added == ["good"] and not good.answer.done()
    await backend.shutdown()


async def test_shutdown_fails_what_is_pending_and_closes_vllm(backend: Any) -> None:
    waiting = job("a", [1])
    await backend.add([waiting])
    await backend.shutdown()
    with pytest.raises(EngineError, match="was shut down"):
        await asyncio.wait_for(waiting.answer, 5)
    assert backend._core.closed


async def test_a_failed_command_reaches_its_caller_only(backend: Any) -> None:
    with pytest.raises(AttributeError):
        await backend.rpc("nothing")
    await backend.add([job("a", [1])])
    await backend.shutdown()
