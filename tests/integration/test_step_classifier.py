"""A classifier of steps on real Megatron: layouts agree, it learns, and vLLM serves its export."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_rig import engine_config
from trainer_ranks import Ranks, rollouts, trainer_config, view_of

from rlpost.algorithms.step_classification import StepClassification, StepClassificationConfig
from rlpost.cluster.local import LocalCluster, LocalClusterConfig
from rlpost.cluster.workers import Placement
from rlpost.engines.pooling import PoolingEngine, PoolingEngineConfig
from rlpost.errors import EngineError
from rlpost.metrics import merge, results
from rlpost.prm.calibration import bin_sums, calibration_error
from rlpost.prm.steps import split_steps
from rlpost.trainers.megatron.classifier_rank import (
    MegatronClassifierRank,
    MegatronClassifierRankConfig,
)
from rlpost.types import BatchView, SampleBlock

pytestmark = pytest.mark.slow

ROWS = list(range(12))
ON_ONE = [[ROWS[:8]], [ROWS[8:]]]
ON_TWO = [[ROWS[:5], ROWS[5:8]], [[], ROWS[8:]]]
SEPARATORS = range(0, 101, 4)
LAYOUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "dp2": ({"dp": 2}, ON_TWO),
    "tp2": ({"tp": 2}, ON_ONE),
    "pp2": ({"pp": 2}, ON_ONE),
}


def stepped() -> tuple[SampleBlock, tuple[tuple[float, ...], ...]]:
    """Random rollouts whose steps are right when their last token is below 50; each third step of
    a sample has no score."""
    block = rollouts(seed=0)
    cut = [
        (row, split_steps(row["token_ids"], row["loss_mask"], SEPARATORS))
        for _, row in block.rows()
    ]
    scores = tuple(
        tuple(
            float("nan") if place % 3 == 2 else float(row["token_ids"][end] < 50)
            for place, end in enumerate(steps.ends)
        )
        for row, steps in cut
    )
    index = np.concatenate([steps.index_L for _, steps in cut])
    return dataclasses.replace(block, tokens={**block.tokens, "step_index": index}), scores


BLOCK, SCORES = stepped()


def view(shares: Any) -> BatchView:
    made = view_of(BLOCK, shares)
    return dataclasses.replace(made, scalars=dataclasses.replace(made.scalars, step_rewards=SCORES))


def config(**changes: Any) -> MegatronClassifierRankConfig:
    values = {**vars(trainer_config(**changes))}
    del values["logprobs_chunk_tokens"]
    return MegatronClassifierRankConfig(**values)


def trained(ranks: Ranks, model: Path, shares: Any, steps: int, **changes: Any) -> Any:
    """(metrics of each batch, probability [L] of each sample before the last update)."""
    algorithm = StepClassification(StepClassificationConfig(num_minibatches=2, num_ppo_epochs=1))
    ranks.start(config(**changes), model=model, target=MegatronClassifierRank, algorithm=algorithm)
    history = []
    for _ in range(steps):
        parts = ranks.call("train", view(shares))
        history.append(results(merge(part.metrics for part in parts)))
    rows = [row for part in parts if part.block is not None for row in part.block.ref.rows()]
    return history, {name: row["step_probability"] for name, row in rows}


@pytest.fixture(scope="module")
def one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """History and probabilities of a classifier on one rank, and the folder of its export."""
    ranks, folder = Ranks(1), tmp_path_factory.mktemp("export") / "hf"
    try:
        history, _ = trained(ranks, model, ON_ONE, steps=20)
        ranks.call("save_hf", str(folder))
        (part,) = ranks.call("train", view(ON_ONE))
        said = {name: row["step_probability"] for name, row in part.block.ref.rows()}
        yield history, said, folder
    finally:
        ranks.close()


def test_it_starts_undecided_and_learns(one: Any) -> None:
    history, said, _ = one
    assert history[0]["train/loss"] == pytest.approx(np.log(2), abs=0.05)
    assert history[-1]["train/loss"] < 0.6 * history[0]["train/loss"]
    assert history[-1]["train/accuracy"] > 0.9
    pairs = [
        (probability, score)
        for (name, row), scores in zip(BLOCK.rows(), SCORES, strict=True)
        for probability, score in zip(
            said[name][~np.isnan(said[name])], np.array(scores)[~np.isnan(scores)], strict=True
        )
    ]
    assert len(pairs) == sum(not np.isnan(score) for scores in SCORES for score in scores)
    assert calibration_error(bin_sums(*np.array(pairs).T)) < 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_the_same(one: Any, two: Ranks, model: Path, layout: str) -> None:
    changes, shares = LAYOUTS[layout]
    history, _ = trained(two, model, shares, steps=3, **changes)
    for ours, theirs in zip(history, one[0], strict=False):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def served(folder: Path, log_dir: Path, sequences: list[list[int]]) -> Any:
    """Outputs of a pooling engine for each sequence, and its answer to one that is too long."""
    options = PoolingEngineConfig(**vars(engine_config()))
    cluster = LocalCluster(
        LocalClusterConfig(
            num_cpus=1,
            num_gpus=0,
            object_store_bytes=80 << 20,
            start_deadline_s=60.0,
            cores={},
        ),
        log_dir=log_dir,
    )

    async def ask() -> Any:
        worker = cluster.spawn(role="prm", rank=0, placement=Placement(1, 0, options.env))
        context = {
            "model_path": str(folder),
            "dtype": "float32",
            "max_model_len": 64,
            "role": "prm",
            "rank": 0,
            "seed": 0,
        }
        await worker.create(PoolingEngine, [options], context, deadline_s=90.0)
        await worker.call("start", deadline_s=240.0)
        outputs = await asyncio.gather(
            *(worker.call("classify", ids, deadline_s=60.0) for ids in sequences)
        )
        with pytest.raises(EngineError, match=r"65 tokens; 1 to 64 are possible"):
            await worker.call("classify", [1] * 65, deadline_s=60.0)
        await worker.call("shutdown", deadline_s=60.0)
        return outputs

    with cluster.running():
        return asyncio.run(ask())


def test_vllm_and_transformers_say_what_the_trainer_said(one: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    _, said, folder = one
    rows = [(name, row["token_ids"].tolist()) for name, row in BLOCK.rows()]
    theirs = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = served(folder, tmp_path, [ids for _, ids in rows])
    for (name, ids), output in zip(rows, outputs, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(output, logits, atol=1e-4)
        probability = np.exp(output[:, 1]) / np.exp(output).sum(axis=1)
        known = ~np.isnan(said[name])
        np.testing.assert_allclose(probability[known], said[name][known], atol=1e-4)
