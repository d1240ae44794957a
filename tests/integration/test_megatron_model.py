"""Real Megatron on two gloo ranks against transformers, for every supported architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_models
import pytest
import torch
import torch.multiprocessing
from megatron_topologies import LAYOUTS, LENGTHS, run_rank, token_ids

pytestmark = pytest.mark.slow

Facts = list[dict[Any, dict[str, Any]]]  # by rank
CASES = [(layout, name) for layout, (*_, names) in LAYOUTS.items() for name in names]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in megatron_models.NAMES:
        megatron_models.write(folder, name)
    return folder


@pytest.fixture(scope="module")
def facts(models: Path) -> Facts:
    torch.multiprocessing.spawn(run_rank, (str(models),), nprocs=2)
    return [torch.load(models / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_logits_equal_transformers(facts: Facts, layout: str, name: str) -> None:
    model = megatron_models.build(name)
    with torch.no_grad():
        parts = [model(ids[None]).logits[0] for ids in token_ids().split(LENGTHS)]
    # The last rank is on the last pipeline stage, and holds all logits under tensor parallelism.
    torch.testing.assert_close(
        facts[1][layout, name]["logits"], torch.cat(parts), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_export_is_bit_exact_and_complete(
    facts: Facts, models: Path, layout: str, name: str
) -> None:
    from rlpost.trainers.megatron.hf_io import HfReader

    on_rank = [rank[layout, name] for rank in facts]
    assert [rank["inexact"] for rank in on_rank] == [[], []]
    stages = on_rank if layout == "pp2" else on_rank[:1]
    exported = [tensor for stage in stages for tensor in stage["exported"]]
    assert sorted(exported) == HfReader(models / name).names()


@pytest.mark.parametrize("name", megatron_models.NAMES)
def test_packed_equals_one_by_one(facts: Facts, name: str) -> None:
    run = facts[0]["tp1", name]
    torch.testing.assert_close(run["logits"], run["alone"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_gradient_norm_counts_every_shard_once(facts: Facts, name: str) -> None:
    single = facts[0]["tp1", name]["gradient_norm"]
    assert facts[0]["tp2", name]["gradient_norm"] == pytest.approx(single, rel=1e-4)


def test_plain_torch_is_left_alone_by_the_cpu_facade(facts: Facts) -> None:
    assert facts[0]["plain_torch"]["type"] == "torch.FloatTensor"
    assert ("cuda" in facts[0]["plain_torch"]) is not torch.cuda.is_available()
