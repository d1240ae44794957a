"""Every promise of rlpost.engines.base, kept by vLLM in both process layouts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_rig import (
    EOS,
    MAX_LEN,
    chunks_of,
    distance_to_hf,
    engine_config,
    generate,
    hf_logprobs,
    push,
    qwen2_folder,
    request,
    running_engines,
    tensors_of,
)

from rlpost.cluster.workers import Worker
from rlpost.errors import EngineError, WeightSyncError
from rlpost.weight_sync.object_store import to_store

pytestmark = pytest.mark.slow
LAYOUTS = ("in_process", "async_llm")
DELAYS = (0.1, 0.05, 0.02, 0.2, 0.4)  # seconds until requests are somewhere in the middle
versions = count(1)
names = map("r{}".format, count())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("models")
    return {seed: qwen2_folder(root / str(seed), seed=seed) for seed in (1, 2)}


@pytest.fixture(scope="module")
def engines(
    folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Worker]]:
    configs = [engine_config(process_layout=layout) for layout in LAYOUTS]
    wanted = [(folders[1], config, "float32") for config in configs]
    with running_engines(tmp_path_factory.mktemp("logs"), wanted) as workers:
        yield dict(zip(LAYOUTS, workers, strict=True))


@pytest.fixture(params=LAYOUTS)
def engine(request: pytest.FixtureRequest, engines: dict[str, Worker]) -> Worker:
    return engines[request.param]


async def call(engine: Worker, method: str, *args: Any) -> Any:
    return await engine.call(method, *args, deadline_s=60.0)


async def test_logprobs_are_those_of_the_sampled_distribution(
    engine: Worker, folders: dict[int, Path]
) -> None:
    await push([engine], folders[1], next(versions))
    asked = request(next(names), temperature=0.7)
    (answer,) = await generate(engine, [asked])
    assert distance_to_hf(folders[1], asked, answer) < 1e-4


async def test_the_same_submit_gives_the_same_tokens(engine: Worker) -> None:
    first = await generate(engine, [request(next(names), seed=seed) for seed in range(8)])
    again = await generate(engine, [request(next(names), seed=seed) for seed in range(8)])
    for one, two in zip(first, again, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert one.logprobs.tolist() == two.logprobs.tolist()
    assert len({tuple(answer.token_ids) for answer in first}) > 1


async def test_the_stop_token_is_kept_and_ends_the_answer(engine: Worker) -> None:
    asked = [request(next(names), seed=seed, max_tokens=100) for seed in range(16)]
    answers = await generate(engine, asked)
    stopped = [answer for answer in answers if answer.finish_reason == "stop"]
    assert stopped
    for answer in answers:
        assert len(answer.token_ids) == len(answer.logprobs) == len(answer.policy_versions)
        ends = np.flatnonzero(answer.token_ids == EOS).tolist()
        assert ends == ([len(answer.token_ids) - 1] if answer.finish_reason == "stop" else [])


async def test_a_result_is_handed_out_once(engine: Worker) -> None:
    asked = request(next(names))
    await generate(engine, [asked])
    with pytest.raises(EngineError, match=f"no request '{asked.request_id}'"):
        await call(engine, "collect", [asked.request_id])


async def test_bad_requests_are_refused_by_name(engine: Worker) -> None:
    with pytest.raises(EngineError, match=f"'long' has {MAX_LEN} tokens"):
        await call(engine, "submit", [request("long", tokens=[5] * MAX_LEN)])
    with pytest.raises(EngineError, match="'twin' was submitted twice"):
        await call(engine, "submit", [request("twin"), request("twin")])
    await call(engine, "submit", [request("twin")])
    with pytest.raises(EngineError, match="'twin' was submitted twice"):
        await call(engine, "submit", [request("twin")])
    await call(engine, "collect", ["twin"])


async def test_an_aborted_answer_keeps_its_tokens(engine: Worker) -> None:
    def requests() -> list[Any]:
        return [request(next(names), seed=seed, max_tokens=400) for seed in range(6)]

    whole = [answer.token_ids.tolist() for answer in await generate(engine, requests())]
    for delay in DELAYS:
        asked = requests()
        ids = [item.request_id for item in asked]
        await call(engine, "submit", asked)
        await asyncio.sleep(delay)
        await call(engine, "abort", ids)
        answers = await call(engine, "collect", ids)
        cut = [item for item in answers if item.finish_reason == "abort" and len(item.token_ids)]
        if cut:
            break
    assert cut
    for tokens, answer in zip(whole, answers, strict=True):
        assert answer.token_ids.tolist() == tokens[: len(answer.token_ids)]
        assert len(answer.token_ids) == len(answer.logprobs) == len(answer.policy_versions)


async def test_versions_mark_where_an_update_came_in_flight(
    engine: Worker, folders: dict[int, Path]
) -> None:
    for delay in DELAYS:
        old = next(versions)
        await push([engine], folders[1], old)
        asked = [request(next(names), seed=seed, max_tokens=400) for seed in range(8)]
        await call(engine, "submit", asked)
        await asyncio.sleep(delay)
        new = next(versions)
        await push([engine], folders[2], new)
        answers = await call(engine, "collect", [item.request_id for item in asked])
        both = [item for item in answers if set(item.policy_versions) == {old, new}]
        if both:
            break
    assert both
    for item in answers:
        assert set(item.policy_versions) <= {old, new}
        assert (np.diff(item.policy_versions) >= 0).all()
    row = next(row for row, item in enumerate(answers) if item is both[0])
    await assert_new_part_is_of(folders[2], asked[row], answers[row], new)


async def assert_new_part_is_of(folder: Path, asked: Any, answer: Any, new: int) -> None:
    """Tokens after the update follow the new weights on the whole context, old tokens too."""
    ids = [*asked.token_ids, *answer.token_ids.tolist()]
    expected = hf_logprobs(folder, ids)[len(asked.token_ids) - 1 :]
    later = torch.from_numpy(answer.policy_versions == new)
    found = torch.from_numpy(answer.logprobs.copy())
    assert float((expected - found)[later].abs().max()) < 1e-4


async def test_an_update_of_tied_weights_equals_transformers(
    engine: Worker, folders: dict[int, Path]
) -> None:
    sequence = list(range(3, 70))
    for seed in (2, 1):
        await push([engine], folders[seed], next(versions))
        (found,) = await call(engine, "logprobs", [sequence])
        expected = hf_logprobs(folders[seed], sequence)
        assert float((torch.tensor(found) - expected).abs().max()) < 1e-4


async def test_the_prefix_cache_is_dropped_at_commit(
    engine: Worker, folders: dict[int, Path]
) -> None:
    prompt = list(range(3, 99))  # three whole cache blocks
    await push([engine], folders[1], next(versions))
    await generate(engine, [request(next(names), tokens=prompt)])
    before = await call(engine, "stats")
    await generate(engine, [request(next(names), tokens=prompt)])
    after = await call(engine, "stats")
    memory = await call(engine, "memory")
    assert memory["rss_peak_bytes"] > 1e8 and memory["pss_bytes"] > 1e7
    assert after["cached_tokens"] - before["cached_tokens"] >= 64
    await push([engine], folders[2], next(versions))
    asked = request(next(names), tokens=prompt)
    (answer,) = await generate(engine, [asked])
    assert (await call(engine, "stats"))["cached_tokens"] == after["cached_tokens"]
    assert distance_to_hf(folders[2], asked, answer) < 1e-4


async def test_bad_weight_sets_are_refused_and_change_nothing(
    engine: Worker, folders: dict[int, Path]
) -> None:
    await push([engine], folders[1], next(versions))
    tensors = tensors_of(folders[2])
    bad = {
        "k_proj.bias is missing": {
            k: v for k, v in tensors.items() if "1.self_attn.k_proj.b" not in k
        },
        "norm.weight has shape": {**tensors, "model.norm.weight": torch.ones(3)},
        "model.nerm.weight is unknown": {**tensors, "model.nerm.weight": torch.ones(3)},
        "is bfloat16, the engine": {name: value.bfloat16() for name, value in tensors.items()},
    }
    with pytest.raises(WeightSyncError, match=r"pause\(\) first"):
        await call(engine, "load_weights", chunks_of(tensors, to_store))
    await call(engine, "pause", "keep")
    for message, weights in bad.items():
        with pytest.raises(WeightSyncError, match=message):
            await call(engine, "load_weights", chunks_of(weights, to_store))
    await call(engine, "resume")
    asked = request(next(names))
    (answer,) = await generate(engine, [asked])
    assert distance_to_hf(folders[1], asked, answer) < 1e-4


async def test_pause_keep_freezes_and_drain_finishes(engine: Worker) -> None:
    asked = [request(next(names), seed=seed, max_tokens=60) for seed in range(4)]
    ids = [item.request_id for item in asked]
    await call(engine, "pause", "keep")
    await call(engine, "submit", asked)
    await asyncio.sleep(0.2)
    assert (await call(engine, "stats"))["pending_requests"] == 4
    await call(engine, "resume")
    await asyncio.sleep(0.02)
    await call(engine, "pause", "drain")
    await asyncio.sleep(0.05)
    assert (await call(engine, "stats"))["pending_requests"] == 0
    await call(engine, "resume")
    await call(engine, "collect", ids)


@pytest.mark.parametrize("parts", [[None], ["weights", "kv_cache"]])
async def test_an_engine_generates_the_same_after_sleep(
    engine: Worker, parts: list[str | None]
) -> None:
    (before,) = await generate(engine, [request(next(names))])
    await call(engine, "sleep")
    for part in parts:
        await call(engine, "wake", part)
    (after,) = await generate(engine, [request(next(names))])
    assert before.token_ids.tolist() == after.token_ids.tolist()


async def test_versions_only_grow(engine: Worker) -> None:
    with pytest.raises(EngineError, match="versions only grow"):
        await call(engine, "commit", -1)


async def test_both_layouts_answer_alike(
    engines: dict[str, Worker], folders: dict[int, Path]
) -> None:
    await push(list(engines.values()), folders[2], next(versions))
    asked = [request(f"alike{seed}", seed=seed) for seed in range(4)]
    one, two = [await generate(engine, asked) for engine in engines.values()]
    for left, right in zip(one, two, strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()


async def test_a_killed_vllm_process_fails_everyone_quickly(engines: dict[str, Worker]) -> None:
    engine = engines["async_llm"]  # the last test: it does not come back
    asked = [request(f"doomed{seed}", seed=seed, max_tokens=400) for seed in range(4)]
    await call(engine, "pause", "keep")
    await call(engine, "submit", asked)
    os.kill(core_process(await engine.pid()), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"engine\[1\] died"):
        await call(engine, "collect", [item.request_id for item in asked])
    with pytest.raises(EngineError, match=r"engine\[1\]"):
        await generate(engine, [request("late")])
    for method, argument in (("pause", "keep"), ("fingerprints", ["model.norm.weight"])):
        with pytest.raises(EngineError, match=r"engine\[1\]"):
            await call(engine, method, argument)
    assert time.monotonic() - started < 10


def core_process(pid: int) -> int:
    """The process below worker `pid` in which vLLM's EngineCore runs."""
    (core,) = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
        if "EngineCor" in Path(f"/proc/{child}/comm").read_text()
    ]
    return core
