"""What only a GPU can show: that moving out frees memory, and that nothing is lost by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_models
import pytest
import torch
from engine_rig import chunks_of, engine_config, engine_context, tensors_of
from trainer_ranks import Ranks, grpo, rollouts, trainer_config, with_passes
from whole_run import GRPO, WholeRun

from rlpost.engines.vllm import VllmEngine
from rlpost.weight_sync.object_store import to_store

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BLOCK = rollouts(seed=0)
SHARES = [[list(range(12))]]


def test_a_trainer_that_moved_out_goes_on_as_if_it_had_stayed(tmp_path: Path) -> None:
    model = megatron_models.write(tmp_path, "llama")
    ranks = Ranks(1)
    hashes = []
    try:
        for moves in (False, True):
            ranks.start(trainer_config(num_gpus_per_rank=1.0), model=model, algorithm=grpo())
            view = with_passes(ranks, BLOCK, SHARES)
            ranks.call("train", view)
            if moves:
                (before,) = ranks.call("memory")
                ranks.call("offload")
                (after,) = ranks.call("memory")
                assert after["device_bytes"] < 0.1 * before["device_bytes"]
                ranks.call("onload")
            ranks.call("train", view)
            hashes += ranks.call("parameters_hash")
    finally:
        ranks.close()
    assert hashes[0] == hashes[1]


async def test_an_engine_frees_its_gpu_and_takes_weights_before_its_kv_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpost.cluster.store.put", lambda buffer: buffer)
    monkeypatch.setattr("rlpost.cluster.store.fetch", lambda buffer: buffer)
    folder = megatron_models.write(tmp_path, "llama")
    chunks = chunks_of(tensors_of(folder), to_store)
    config = engine_config(
        num_gpus_per_engine=1.0, vllm={"enforce_eager": True, "gpu_memory_utilization": 0.5}
    )
    engine = VllmEngine(config, **engine_context(folder))
    await engine.start()
    try:
        held = used_bytes()
        await engine.sleep()
        assert used_bytes() < 0.2 * held
        await engine.wake("weights")
        assert used_bytes() < 0.2 * held
        await engine.pause("keep")
        await engine.load_weights(chunks)
        await engine.wake("kv_cache")
        await engine.commit(1)
        await engine.resume()
        assert used_bytes() > 0.8 * held
    finally:
        await engine.shutdown()


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_engine_and_trainer_share_one_gpu_for_a_whole_run(tmp_path: Path) -> None:
    on_gpu: list[Any] = ["cluster=local_gpu", "engine=vllm_gpu", "trainer=megatron_gpu"]
    shares = ["engine.num_gpus_per_engine=0.5", "trainer.num_gpus_per_rank=0.5"]
    run = WholeRun(
        tmp_path,
        *(*GRPO, *on_gpu, *shares, "loop.colocate=true", "cluster.num_gpus=1"),
        *("checkpoint.save_interval=2", "eval.interval=2", "weight_sync.verify=full"),
    )
    try:
        run.finished()
        assert max(run.column("train/mismatch/max")) < 1e-2
        assert run.checkpoint(2).is_dir() and run.checkpoint(4).is_dir()
    finally:
        run.end()
