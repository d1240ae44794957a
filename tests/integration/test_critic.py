"""The critic on real Megatron: every layout gives the same values and weights; it learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from trainer_ranks import CONF, Ranks, rollouts, trainer_config, view_of

from rlpost.algorithms.ppo import Ppo, PpoConfig
from rlpost.metrics import merge, results
from rlpost.trainers.megatron.critic_rank import MegatronCriticRank, MegatronCriticRankConfig

pytestmark = pytest.mark.slow

BLOCK = rollouts(seed=0)
ROWS = list(range(12))
ON_ONE = [[ROWS[:8]], [ROWS[8:]]]
ON_TWO = [[ROWS[:5], ROWS[5:8]], [[], ROWS[8:]]]
LAYOUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "dp2": ({"dp": 2}, ON_TWO),
    "tp2": ({"tp": 2}, ON_ONE),
    "tp2_sequence": ({"tp": 2, "megatron": {"sequence_parallel": True}}, ON_ONE),
    "pp2": ({"pp": 2}, ON_ONE),
}


def critic_config(**changes: Any) -> MegatronCriticRankConfig:
    values = {**vars(trainer_config(**changes))}
    del values["logprobs_chunk_tokens"]
    return MegatronCriticRankConfig(**values)


def ppo(**changes: Any) -> Ppo:
    values = yaml.safe_load((CONF / "algorithm/ppo.yaml").read_text())
    del values["_target_"]
    return Ppo(PpoConfig(**values | {"lam": 0.9} | changes))


def start(ranks: Ranks, config: MegatronCriticRankConfig, model: Path, **changes: Any) -> None:
    arguments = {"algorithm": ppo(), **changes}
    ranks.start(config, model=model, target=MegatronCriticRank, **arguments)


def with_values(ranks: Ranks, shares: Any, block: Any = BLOCK) -> tuple[Any, dict[str, Any]]:
    """The view with a values column, and the values [L] of each sample."""
    view = view_of(block, shares)
    found = ranks.call("compute_values", view, "values")
    columns = [part.block for part in found if part.block is not None]
    values = dict(row for block in columns for row in block.ref.rows())
    view = dataclasses.replace(view, blocks=(*view.blocks, *columns))
    return view, {name: row["values"] for name, row in values.items()}


def trained(ranks: Ranks, shares: Any, steps: int = 3) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics of the last batch and the values after it."""
    metrics: dict[str, float] = {}
    for _ in range(steps):
        view, _ = with_values(ranks, shares)
        metrics = results(merge(part.metrics for part in ranks.call("train", view)))
    return metrics, with_values(ranks, shares)[1]


@pytest.fixture(scope="module")
def reference(one: Ranks, model: Path) -> tuple[dict[str, float], dict[str, Any]]:
    start(one, critic_config(), model)
    return trained(one, ON_ONE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_loss_and_values(
    two: Ranks, model: Path, reference: tuple[Any, Any], layout: str
) -> None:
    changes, shares = LAYOUTS[layout]
    start(two, critic_config(**changes), model)
    metrics, values = trained(two, shares)
    assert metrics == pytest.approx(reference[0], rel=1e-4, abs=1e-5)
    assert values.keys() == reference[1].keys()
    for name, column in reference[1].items():
        np.testing.assert_allclose(values[name], column, atol=1e-4)


def test_a_fresh_head_gives_zeros_on_loss_tokens_and_nan_elsewhere(one: Ranks, model: Path) -> None:
    start(one, critic_config(), model)
    _, values = with_values(one, ON_ONE)
    for name, row in BLOCK.rows():
        expected = np.where(row["loss_mask"] == 1, 0.0, np.nan)
        np.testing.assert_array_equal(values[name], expected)


def set_head(rank: Any) -> None:
    """V = first component of the hidden state, plus 0.5."""
    head = rank._network.model.output_layer
    with torch.no_grad():
        head.value_weight.zero_()[0, 0] = 1.0
        head.value_bias.fill_(0.5)


def test_the_value_of_a_token_is_that_of_the_state_before_it(one: Ranks, model: Path) -> None:
    """Against transformers' hidden states, one position earlier."""
    from transformers import AutoModel

    start(one, critic_config(), model)
    one.run(set_head)
    _, values = with_values(one, ON_ONE)
    network = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    for name, row in BLOCK.rows():
        with torch.no_grad():
            hidden = network(torch.from_numpy(row["token_ids"])[None]).last_hidden_state[0, :, 0]
        expected = np.concatenate([[np.nan], hidden.numpy()[:-1] + 0.5])
        expected[row["loss_mask"] == 0] = np.nan
        np.testing.assert_allclose(values[name], expected, atol=1e-4)


def test_values_regress_to_the_returns(one: Ranks, model: Path) -> None:
    """With lam = gamma = 1 the return of each token is its sample's reward."""
    start(one, critic_config(), model, algorithm=ppo(lam=1.0))
    metrics, values = trained(one, ON_ONE, steps=60)
    assert metrics["critic/loss"] < 0.02
    assert metrics["critic/explained_variance"] > 0.8
    errors = [
        np.abs(values[name][row["loss_mask"] == 1] - row["reward"]).mean()
        for name, row in BLOCK.rows()
    ]
    assert np.mean(errors) < 0.1
    assert metrics["critic/return/mean"] == pytest.approx(metrics["critic/value/mean"], abs=0.1)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_a_resumed_critic_continues_bit_by_bit(
    two: Ranks, model: Path, tmp_path: Path, layout: str
) -> None:
    changes, shares = LAYOUTS[layout]
    start(two, critic_config(**changes), model)
    trained(two, shares, steps=1)
    two.call("save", str(tmp_path / "state"))
    straight = trained(two, shares, steps=2)[0], two.call("parameters_hash")
    start(two, critic_config(**changes), model, seed=99)
    two.call("load", str(tmp_path / "state"))
    assert (trained(two, shares, steps=2)[0], two.call("parameters_hash")) == straight


def test_a_critic_starts_again_from_its_own_folder(
    two: Ranks, one: Ranks, model: Path, tmp_path: Path
) -> None:
    """The folder has backbone and head, no vocabulary; the first model's head was missing."""
    start(two, critic_config(pp=2), model)
    _, values = trained(two, ON_ONE)
    two.call("save_hf", str(tmp_path / "critic"))
    assert "lm_head.weight" not in load_file(tmp_path / "critic" / "model.safetensors")
    start(one, critic_config(), tmp_path / "critic")
    _, again = with_values(one, ON_ONE)
    for name, column in values.items():
        np.testing.assert_allclose(again[name], column, atol=1e-5)


def test_a_sample_without_reward_teaches_no_value(one: Ranks, model: Path) -> None:
    rewards = np.array([0.7] + [np.nan] * 11)
    block = dataclasses.replace(BLOCK, scalars={"reward": rewards})
    start(one, critic_config(), model)
    view, _ = with_values(one, [[ROWS]], block)
    (result,) = one.call("train", view)
    assert [name for name, _ in result.block.ref.rows()] == [BLOCK.sample_ids[0]]
    assert result.metrics["critic/return/mean"].result() == pytest.approx(0.7)
