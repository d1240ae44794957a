"""Faults that vLLM has, or had, without saying so; none may reach a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rig import (
    chunks_of,
    engine_config,
    engine_context,
    generate,
    hf_logprobs,
    push,
    qwen2_folder,
    qwen3_moe_folder,
    request,
    running_engines,
    tensors_of,
)

from rlpost.cluster import store
from rlpost.cluster.workers import Worker
from rlpost.engines.vllm import VllmEngine
from rlpost.errors import ConfigError, EngineError, WeightSyncError
from rlpost.fingerprint import fingerprint
from rlpost.weight_sync.object_store import to_store

pytestmark = pytest.mark.slow
SEQUENCE = list(range(3, 70))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "experts": qwen3_moe_folder(root / "experts", seed=1),
        "new experts": qwen3_moe_folder(root / "new-experts", seed=2),
        "dense": qwen2_folder(root / "dense", seed=1),
        "new dense": qwen2_folder(root / "new-dense", seed=2),
    }


@pytest.fixture(scope="module")
def engines(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Worker]]:
    # Prompts beyond 64 tokens in all are prefilled in parts.
    parts = engine_config()
    parts.vllm.update(max_num_batched_tokens=64, max_num_seqs=16)
    wanted = [
        (folders["experts"], parts, "float32"),
        (folders["dense"], engine_config(), "bfloat16"),
    ]
    with running_engines(tmp_path_factory.mktemp("logs"), wanted) as workers:
        yield workers


@pytest.fixture
def moe(engines: list[Worker]) -> Worker:
    return engines[0]


@pytest.fixture
def dense(engines: list[Worker]) -> Worker:
    return engines[1]


async def call(engine: Worker, method: str, *args: Any) -> Any:
    return await engine.call(method, *args, deadline_s=60.0)


async def test_experts_are_used_as_they_were_sent(moe: Worker, folders: dict[str, Path]) -> None:
    """Experts left unpacked after an update give plausible, wrong answers."""
    for version, name in enumerate(["new experts", "experts"], start=1):
        await push([moe], folders[name], version)
        (found,) = await call(moe, "logprobs", [SEQUENCE])
        expected = hf_logprobs(folders[name], SEQUENCE)
        assert float((torch.tensor(found) - expected).abs().max()) < 1e-4


async def test_a_seed_gives_the_same_tokens_when_its_prompt_is_prefilled_in_parts(
    moe: Worker,
) -> None:
    alone = request("alone", tokens=tuple(range(9, 49)))
    crowd = [request(f"crowd {row}", tokens=tuple(range(row, row + 40))) for row in range(6, 9)]
    same = replace(alone, request_id="last in the crowd")
    (expected,) = await generate(moe, [alone])
    *_, found = await generate(moe, [*crowd, same])
    assert found.token_ids.tolist() == expected.token_ids.tolist()


async def test_packed_experts_are_read_back_exactly(moe: Worker, folders: dict[str, Path]) -> None:
    await push([moe], folders["experts"], 3)
    sent = tensors_of(folders["experts"])
    found = await call(moe, "fingerprints", list(sent))
    assert found == {name: fingerprint(tensor) for name, tensor in sent.items()}
    assert any(".experts.3.down_proj." in name for name in sent)


async def test_one_wrong_expert_is_found_by_name(moe: Worker, folders: dict[str, Path]) -> None:
    sent = tensors_of(folders["experts"])
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    wrong = {**sent, name: sent[name].flip(0)}
    await call(moe, "pause", "keep")
    await call(moe, "load_weights", chunks_of(wrong, to_store))
    found = await call(moe, "fingerprints", list(sent))
    assert [key for key in sent if found[key] != fingerprint(sent[key])] == [name]
    await call(moe, "resume")


async def test_bfloat16_weights_arrive_bit_for_bit(dense: Worker, folders: dict[str, Path]) -> None:
    await push([dense], folders["new dense"], 1, dtype="bfloat16")
    sent = {name: value.bfloat16() for name, value in tensors_of(folders["new dense"]).items()}
    found = await call(dense, "fingerprints", [*sent, "lm_head.weight"])
    embeddings = fingerprint(sent["model.embed_tokens.weight"])
    assert found.pop("lm_head.weight") == embeddings
    assert found == {name: fingerprint(tensor) for name, tensor in sent.items()}


async def test_a_half_loaded_engine_does_not_serve(dense: Worker, folders: dict[str, Path]) -> None:
    """The load fails after the checks: the buffer is shorter than its specs say."""
    tensors = {name: value.bfloat16() for name, value in tensors_of(folders["dense"]).items()}
    good = chunks_of(tensors, to_store)
    cut = store.put(store.fetch(good[1].buffer)[:64].copy())
    bad = [good[0], type(good[1])(good[1].specs, cut, good[1].fingerprints)]
    await call(dense, "pause", "keep")
    with pytest.raises(WeightSyncError, match="a weight update failed"):
        await call(dense, "load_weights", bad)
    with pytest.raises(EngineError, match="stays paused"):
        await call(dense, "resume")
    await push([dense], folders["dense"], 2, dtype="bfloat16")
    await generate(dense, [request("healed")])


async def test_an_unknown_vllm_option_names_the_nearest(
    moe: Worker, folders: dict[str, Path]
) -> None:
    config = engine_config(vllm={"enforce_eagre": True})
    engine = VllmEngine(config, **engine_context(folders["dense"]))
    with pytest.raises(ConfigError, match=r"engine\.vllm\.enforce_eagre.*enforce_eager"):
        await engine.start()
