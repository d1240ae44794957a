"""The result of an optimizer step must not depend on how it is spread over ranks and micro-batches.

Real Megatron on gloo, one process per rank.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import megatron_models
import numpy as np
import pytest
import torch
from trainer_ranks import VOCAB, Ranks, grpo, rollouts, trainer_config, view_of, with_passes

from rlpost.algorithms.sft import Sft, SftConfig
from rlpost.errors import BudgetError, TrainerError
from rlpost.fingerprint import fingerprint
from rlpost.metrics import merge, results
from rlpost.weight_sync.object_store import to_store

pytestmark = pytest.mark.slow

BLOCK = rollouts(seed=0)
ROWS = list(range(12))
# Two optimizer steps, so that the second one is off-policy.
ON_ONE = [[ROWS[:7]], [ROWS[7:]]]
ON_TWO = [[ROWS[:7:2], ROWS[1:7:2]], [ROWS[7:9], ROWS[9:]]]
LAYOUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "tp2": ({"tp": 2}, ON_ONE),
    "tp2 with sequence parallelism": ({"tp": 2, "megatron": {"sequence_parallel": True}}, ON_ONE),
    "pp2": ({"pp": 2}, ON_ONE),
    "dp2": ({"dp": 2}, ON_TWO),
    "dp2, unequal micro-batches": (
        {"dp": 2, "micro_batch_tokens": 20},
        [[ROWS[:6], ROWS[6:7]], [ROWS[7:8], ROWS[8:]]],
    ),
    "dp2, a rank without rows": ({"dp": 2}, [[ROWS[:7], []], [[], ROWS[7:]]]),
}


def tensors(ranks: Ranks) -> dict[str, torch.Tensor]:
    """What the ranks export, checked against the fingerprints sent along."""
    found = {}
    parts = ranks.call("export_weights", "float32", to_store)
    for chunk in [chunk for part in parts for chunk in part]:
        for spec in chunk.specs:
            assert spec.offset % 64 == 0
            raw = chunk.buffer[spec.offset :].view(np.float32)[: math.prod(spec.shape)]
            found[spec.name] = torch.from_numpy(raw.copy()).reshape(spec.shape)
            assert chunk.fingerprints[spec.name] == fingerprint(found[spec.name])
    return found


def train(ranks: Ranks, view: Any) -> dict[str, float]:
    return results(merge(result.metrics for result in ranks.call("train", view)))


def trained(ranks: Ranks, config: Any, model: Path, shares: Any) -> tuple[Any, Any]:
    """(metrics of the batch, weights afterwards)."""
    ranks.start(config, model=model, algorithm=grpo())
    return train(ranks, with_passes(ranks, BLOCK, shares)), tensors(ranks)


@pytest.fixture(scope="module")
def reference(one: Ranks, model: Path) -> tuple[Any, Any]:
    return trained(one, trainer_config(), model, ON_ONE)


def assert_equal(found: tuple[Any, Any], reference: tuple[Any, Any]) -> None:
    assert found[0] == pytest.approx(reference[0], rel=1e-5, abs=1e-5)
    assert found[1].keys() == reference[1].keys()
    for name, tensor in found[1].items():
        torch.testing.assert_close(tensor, reference[1][name], rtol=0, atol=1e-5, msg=name)


def test_the_reference_run_moves_the_weights(
    one: Ranks, model: Path, reference: tuple[Any, Any]
) -> None:
    one.start(trainer_config(), model=model, algorithm=grpo())
    before = tensors(one)
    moved = max((reference[1][name] - before[name]).abs().max() for name in before)
    assert moved > 1e-4
    assert reference[0]["train/grad_norm"] > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_metrics_and_weights(
    two: Ranks, model: Path, reference: tuple[Any, Any], layout: str
) -> None:
    changes, shares = LAYOUTS[layout]
    assert_equal(trained(two, trainer_config(**changes), model, shares), reference)


@pytest.mark.parametrize("micro_batch_tokens", [1, 30])
@pytest.mark.parametrize("logprobs_chunk_tokens", [3, 1024])
def test_packing_and_chunking_do_not_change_the_result(
    one: Ranks,
    model: Path,
    reference: tuple[Any, Any],
    micro_batch_tokens: int,
    logprobs_chunk_tokens: int,
) -> None:
    config = trainer_config(
        micro_batch_tokens=micro_batch_tokens, logprobs_chunk_tokens=logprobs_chunk_tokens
    )
    assert_equal(trained(one, config, model, ON_ONE), reference)


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2", "dp2"])
def test_logprobs_equal_transformers_and_are_nan_off_the_loss_tokens(
    one: Ranks, two: Ranks, model: Path, layout: str
) -> None:
    ranks, shares = (one, [[ROWS]]) if layout == "tp1" else (two, [[ROWS]])
    sizes = {} if layout == "tp1" else {layout[:2]: 2}
    if layout == "dp2":
        shares = [[ROWS[:5], ROWS[5:]]]
    ranks.start(trainer_config(**sizes), model=model, algorithm=None, temperature=0.7)
    found = ranks.call("compute_logprobs", view_of(BLOCK, shares), "ref_logprobs")
    columns = dict(row for part in found if part.block is not None for row in part.block.ref.rows())
    assert sorted(columns) == sorted(BLOCK.sample_ids)
    for name, row in BLOCK.rows():
        expected = transformers_logprobs(row["token_ids"], temperature=0.7)
        expected[row["loss_mask"] == 0] = np.nan
        np.testing.assert_allclose(columns[name]["ref_logprobs"], expected, atol=1e-4)


def transformers_logprobs(token_ids: Any, *, temperature: float) -> Any:
    """log p(token_t | before) at t; NaN at t = 0."""
    network = megatron_models.build("qwen3")
    ids = torch.from_numpy(token_ids)
    with torch.no_grad():
        logprobs = (network(ids[None]).logits[0] / temperature).log_softmax(-1)[:-1]
    picked = logprobs.gather(1, ids[1:, None]).squeeze(1)
    return np.concatenate([[np.nan], picked.numpy()])


@pytest.mark.parametrize("layout", ["tp1", "dp2", "tp2", "pp2"])
def test_a_resumed_run_continues_bit_by_bit(
    one: Ranks, two: Ranks, model: Path, tmp_path: Path, layout: str
) -> None:
    """Torch's per-parameter Adam step, the schedule's position and the RNG are all restored."""
    ranks = one if layout == "tp1" else two
    config = trainer_config(**({} if layout == "tp1" else {layout[:2]: 2}))
    ranks.start(config, model=model, algorithm=grpo())
    view = with_passes(ranks, BLOCK, ON_TWO if layout == "dp2" else ON_ONE)
    train(ranks, view)
    ranks.call("save", str(tmp_path / "state"))
    straight = train(ranks, view), ranks.call("parameters_hash"), ranks.run(next_random)
    ranks.start(config, model=model, algorithm=grpo(), seed=99)
    ranks.call("load", str(tmp_path / "state"))
    assert (train(ranks, view), ranks.call("parameters_hash"), ranks.run(next_random)) == straight


def next_random(rank: Any) -> float:
    return float(torch.rand(()))


def test_a_saved_folder_holds_the_trained_weights(
    two: Ranks, model: Path, reference: tuple[Any, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    trained(two, trainer_config(pp=2), model, ON_ONE)
    two.call("save_hf", str(tmp_path / "hf"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    for name, tensor in reference[1].items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-5, msg=name)


class Broken(Sft):
    """Its gradient is NaN on the last rank."""

    def loss(self, inputs: Any) -> Any:
        value, metrics = super().loss(inputs)
        rank = torch.distributed.get_rank()
        return value * (math.nan if rank == torch.distributed.get_world_size() - 1 else 1), metrics


SFT = {"loss_aggregation": "token_mean", "norm_length": None, "num_minibatches": 2}


def test_a_nan_gradient_on_one_rank_skips_the_step_on_all_and_is_counted(
    two: Ranks, model: Path
) -> None:
    config = trainer_config(dp=2, max_skipped_steps=2)
    two.start(config, model=model, algorithm=Broken(SftConfig(**SFT)))
    before = two.call("parameters_hash")
    found = two.call("train", view_of(BLOCK, ON_TWO))
    assert [result.skipped_steps for result in found] == [2, 2]
    assert two.call("parameters_hash") == before
    with pytest.raises(BudgetError, match=r"max_skipped_steps \(2\)"):
        two.call("train", view_of(BLOCK, ON_TWO))


def test_a_sample_without_reward_is_not_trained_at_all(two: Ranks, model: Path) -> None:
    """Not by its KL or entropy either, and the totals do not count it."""
    block = rollouts(seed=0)
    block.scalars["reward"][[0, 7]] = np.nan
    left = [[[row for row in share if row not in (0, 7)] for share in step] for step in ON_TWO]
    found = []
    for shares in (ON_TWO, left):
        two.start(trainer_config(dp=2), model=model, algorithm=grpo())
        found.append((train(two, with_passes(two, block, shares)), tensors(two)))
    assert_equal(found[0], found[1])


@pytest.mark.parametrize("visits", [1, 2])
def test_the_advantages_of_all_rows_are_handed_back_once(
    two: Ranks, model: Path, visits: int
) -> None:
    two.start(trainer_config(dp=2), model=model, algorithm=grpo())
    results = two.call("train", with_passes(two, BLOCK, ON_TWO * visits))
    found = dict(row for part in results for row in part.block.ref.rows())
    assert sorted(found) == sorted(BLOCK.sample_ids)
    rewards = dict(zip(BLOCK.sample_ids, BLOCK.scalars["reward"], strict=True))
    for name, row in BLOCK.rows():
        values = found[name]["advantages"]
        assert np.isnan(values[row["loss_mask"] == 0]).all()
        group = [rewards[other] for other in rewards if other.split("#")[0] == name.split("#")[0]]
        better = rewards[name] > np.mean(group)
        assert ((values[row["loss_mask"] == 1] > 0) == better).all()


def test_supervised_training_needs_no_passes_and_lowers_the_loss(one: Ranks, model: Path) -> None:
    one.start(trainer_config(), model=model, algorithm=Sft(SftConfig(**SFT)))
    losses = [train(one, view_of(BLOCK, ON_ONE))["train/loss"] for _ in range(5)]
    assert losses[-1] < losses[0] - 0.1


def test_the_gradient_is_clipped_but_reported_unclipped(
    one: Ranks, model: Path, reference: tuple[Any, Any]
) -> None:
    import dataclasses

    config = trainer_config()
    optimizer = dataclasses.replace(config.optimizer, clip_grad=1e-9)
    clipped = dataclasses.replace(config, optimizer=optimizer)
    one.start(clipped, model=model, algorithm=grpo())
    before = tensors(one)
    metrics = train(one, with_passes(one, BLOCK, ON_ONE[:1]))
    assert metrics["train/grad_norm"] > 0.1
    assert max((tensors(one)[name] - before[name]).abs().max() for name in before) < 1e-6


def test_impossible_batches_are_refused_with_names(one: Ranks, model: Path) -> None:
    one.start(trainer_config(), model=model, algorithm=grpo())
    with pytest.raises(TrainerError, match="column 'old_logprobs' is missing for 12 of 12"):
        one.call("train", view_of(BLOCK, ON_ONE))
    with pytest.raises(TrainerError, match="2 shares for 1 data-parallel ranks"):
        one.call("train", view_of(BLOCK, ON_TWO))
    foreign = rollouts(seed=1)
    foreign.tokens["token_ids"][0] = VOCAB
    with pytest.raises(TrainerError, match="outside the vocabulary"):
        one.call("compute_logprobs", view_of(foreign, ON_ONE), "old_logprobs")
    one.start(trainer_config(), model=model, algorithm=None)
    with pytest.raises(TrainerError, match="has no algorithm"):
        one.call("train", view_of(BLOCK, ON_ONE))
