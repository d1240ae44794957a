"""PPO through `launch.py`: the critic alone at first, both in the checkpoint, both resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from whole_run import PPO, WholeRun

from rlpost.prm.credit import step_normalized

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUN = (
    *PPO,
    "prm=verifier",
    "prm.program._target_=own_rewards.StepDigits",
    "+prm.program.wanted=2",
    "prm.steps.separator=[4,5,6,7]",
    "num_steps=3",
    "algorithm.num_critic_only_steps=2",
    "checkpoint.save_interval=1",
    "checkpoint.keep_last=3",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeRun]:
    run = WholeRun(tmp_path_factory.mktemp("ppo"), *RUN)
    try:
        yield run.finished()
    finally:
        run.end()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")  # type: ignore[no-any-return]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_while_the_critic_trains_alone_the_actor_stays_as_it_is(run: WholeRun) -> None:
    actor = [weights(run.checkpoint(step) / "hf") for step in (1, 2, 3)]
    critic = [weights(run.checkpoint(step) / "critic_hf") for step in (1, 2, 3)]
    assert equal(actor[0], actor[1]) and not equal(actor[1], actor[2])
    assert not equal(critic[0], critic[1]) and not equal(critic[1], critic[2])
    assert {"value_head.weight", "value_head.bias"} <= critic[0].keys()
    assert "lm_head.weight" not in critic[0]


def test_no_version_is_published_for_the_critic(run: WholeRun) -> None:
    rows = {row["step"]: row for row in run.metrics()}
    assert [rows[step]["policy/version"] for step in (1, 2, 3)] == [0.0, 0.0, 1.0]
    assert ["train/loss" in rows[step] for step in (1, 2, 3)] == [False, False, True]
    for step in (1, 2, 3):
        assert rows[step].keys() >= {
            *("critic/loss", "critic/value/mean", "critic/return/mean", "critic/grad_norm"),
            *("critic/explained_variance", "time/values_s", "time/train_critic_s"),
        }


def test_samples_record_values_and_returns(run: WholeRun) -> None:
    alone, both = (
        pq.read_table(run.run_dir / "samples" / f"step_{step:06d}.parquet").to_pylist()
        for step in (2, 3)
    )
    assert {"values", "returns"} <= alone[0].keys() and "old_logprobs" not in alone[0]
    assert {"values", "returns", "advantages", "old_logprobs"} <= both[0].keys()
    row: dict[str, Any] = both[0]
    kept = [i for i, mask in enumerate(row["loss_mask"]) if mask]
    assert row["returns"][kept[-1]] == pytest.approx(row["reward"])


def test_scores_of_steps_join_the_actors_advantages_alone(run: WholeRun) -> None:
    """A = whitened(GAE) + coef * A^process; the critic's returns are those of the reward."""
    rows = pq.read_table(run.run_dir / "samples" / "step_000003.parquet").to_pylist()
    gae = np.concatenate([np.subtract(kept(row, "returns"), kept(row, "values")) for row in rows])
    whitened = (gae - gae.mean()) / gae.std()
    scores = [tuple(row["step_scores"]) for row in rows]
    earned = step_normalized(scores, [row["prompt_key"] for row in rows])
    terms = [
        np.nan_to_num(of_row)[kept(row, "step_index")]
        for row, of_row in zip(rows, earned, strict=True)
    ]
    steps = np.concatenate(terms)
    advantages = np.concatenate([kept(row, "advantages") for row in rows])
    assert np.std(steps) > 0.1
    np.testing.assert_allclose(advantages, whitened + steps, atol=1e-3)


def kept(row: dict[str, Any], column: str) -> list[Any]:
    return [value for value, mask in zip(row[column], row["loss_mask"], strict=True) if mask]


def test_a_resumed_run_ends_with_the_same_actor_and_critic(run: WholeRun) -> None:
    again = WholeRun(run.output_dir, *RUN, f"resume_from={run.checkpoint(2)}")
    try:
        again.finished()
        for folder in ("hf", "critic_hf"):
            end = weights(again.checkpoint(3) / folder)
            assert equal(end, weights(run.checkpoint(3) / folder)), folder
    finally:
        again.end()
