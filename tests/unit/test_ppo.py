"""GAE, returns and the value loss against plain loops over one sequence after another."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_cases import LENGTHS, REWARDS, build, outcome_inputs, token_inputs

from rlpost import functional as F
from rlpost.algorithms.base import ValueLossInputs
from rlpost.trainers.megatron.packing import pack

SETTINGS = [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.5, 1.0)]


def gae_of_one(rewards, values, gamma, lam):
    advantages, ahead = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        ahead = rewards[t] + gamma * following - values[t] + gamma * lam * ahead
        advantages[t] = ahead
    return advantages


def loop(algorithm, inputs):
    """Advantages before whitening and returns, sequence by sequence."""
    config = algorithm.config
    start, advantages, returns = 0, [], []
    for length, outcome in zip(inputs.lengths_S.tolist(), inputs.outcome_S.tolist(), strict=True):
        span = range(start, start + length)
        values = [inputs.values_M[t].item() for t in span]
        rewards = [
            -config.kl_coef * (inputs.old_logprobs_M[t] - inputs.ref_logprobs_M[t]).item()
            for t in span
        ]
        if length:
            rewards[-1] += outcome
        mine = gae_of_one(rewards, values, config.gamma, config.lam)
        if math.isnan(outcome):
            advantages += [0.0] * length
            returns += [0.0] * length
        else:
            advantages += mine
            returns += [a + v for a, v in zip(mine, values, strict=True)]
        start += length
    return double(advantages), double(returns)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def inputs_of(algorithm, rewards=REWARDS):
    return token_inputs(algorithm.outcome(outcome_inputs(rewards)))


@pytest.mark.parametrize(("gamma", "lam"), SETTINGS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("rewards", [REWARDS, [math.nan, *REWARDS[1:]]])
def test_advantages_and_returns_equal_the_loop(gamma, lam, kl_coef, rewards):
    algorithm = build("ppo", gamma=gamma, lam=lam, kl_coef=kl_coef, whiten_advantages=False)
    inputs = inputs_of(algorithm, rewards)
    advantages, returns = loop(algorithm, inputs)
    torch.testing.assert_close(algorithm.token_advantages(inputs), advantages)
    torch.testing.assert_close(algorithm.returns(inputs), returns)


def test_a_sequence_without_loss_tokens_changes_nothing():
    rewards, values = double([1.0, 2.0, 3.0]), double([0.5, 0.1, 0.2])
    alone = F.gae(rewards, values, torch.tensor([2, 1]), 0.9, 0.8)
    between = F.gae(rewards, values, torch.tensor([2, 0, 1]), 0.9, 0.8)
    assert torch.equal(alone, between)
    assert F.gae(rewards[:0], values[:0], torch.tensor([0, 0]), 0.9, 0.8).tolist() == []


def test_an_answer_cut_off_ends_like_any_other():
    """The value after its last token is 0, whatever follows in the pack."""
    values = double([0.5, 0.7, 100.0, 100.0])
    cut = F.gae(double([0.0, 1.0, 0.0, 0.0]), values, torch.tensor([2, 2]), 1.0, 1.0)
    torch.testing.assert_close(cut[:2], double([0.5, 0.3]))


def test_environment_tokens_are_skipped_and_get_no_reward():
    """Two turns with two environment tokens between, and a trailing one: as if they weren't there.

    With lam < 1 or gamma < 1, zero steps in their place would change every number.
    """
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 0])
    values = np.array([9.0, 0.1, 0.2, 9.0, 9.0, 0.3, 0.4, 9.0], dtype=np.float32)
    row = {"token_ids": np.arange(8), "loss_mask": mask, "values": values}
    batch = pack(("a",), [row], columns=("values",), multiple=1)
    lengths = torch.from_numpy(batch.lengths_S)
    rewards = F.at_last_token(double([1.0]), lengths)
    found = F.gae(rewards, torch.from_numpy(batch.columns["values"]).double(), lengths, 0.9, 0.8)
    expected = gae_of_one([0, 0, 0, 1.0], [0.1, 0.2, 0.3, 0.4], 0.9, 0.8)
    torch.testing.assert_close(found, double(expected))


def test_whitening_is_over_all_ranks_and_leaves_returns_alone():
    whitened, plain = build("ppo"), build("ppo", whiten_advantages=False)
    inputs = inputs_of(plain, [math.nan, *REWARDS[1:]])
    found = whitened.token_advantages(inputs)
    known = found[LENGTHS[0] :]
    assert known.mean().abs() < 1e-12 and (known.std(correction=0) - 1).abs() < 1e-5
    assert not found[: LENGTHS[0]].any()
    torch.testing.assert_close(whitened.returns(inputs), plain.returns(inputs))
    raw = plain.token_advantages(inputs)
    others = iter([[100.0, 50.0], [400.0, 50.0]])  # sum and count, squares and count, elsewhere
    shared = replace(inputs, reduce_sum=lambda parts: parts + double(next(others)))
    count = len(known) + 50
    mean = (raw.sum() + 100) / count
    squares = ((raw[LENGTHS[0] :] - mean) ** 2).sum() + 400
    expected = (raw - mean) / ((squares / count).sqrt() + 1e-6)
    torch.testing.assert_close(whitened.token_advantages(shared)[3:], expected[3:])


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_equals_the_formula(clip):
    values = double([0.0, 0.5, 1.0, 0.15]).requires_grad_()
    old, returns = double([0.1, 0.1, 0.1, 0.1]), double([1.0, 1.0, 0.0, 1.0])
    weights = double([0.4, 0.3, 0.2, 0.1])
    algorithm = build("ppo", value_clip=clip)
    loss, metrics = algorithm.value_loss(ValueLossInputs(values, old, returns, weights))
    expected = 0.0
    columns = [column.tolist() for column in (values, old, returns, weights)]
    for v, o, g, w in zip(*columns, strict=True):
        bounded = v if clip is None else min(max(v, o - clip), o + clip)
        expected += w * 0.5 * max((v - g) ** 2, (bounded - g) ** 2)
    assert loss.item() == pytest.approx(expected)
    assert metrics["critic/loss"].result() == pytest.approx(expected)
    loss.backward()
    moved_towards_the_return_beyond_the_clip = values.grad[1]
    assert (moved_towards_the_return_beyond_the_clip == 0) == (clip is not None)
    assert metrics["critic/clip_fraction"].result() == (0.0 if clip is None else 0.25)


def test_explained_variance():
    returns = double([1.0, 2.0, 4.0])
    keep = torch.ones(3, dtype=torch.bool)
    alone = lambda parts: parts  # noqa: E731
    assert F.explained_variance(returns + 7, returns, keep, alone) == pytest.approx(1.0)
    assert F.explained_variance(returns * 0, returns, keep, alone) == pytest.approx(0.0)
    assert F.explained_variance(-returns, returns, keep, alone) == pytest.approx(-3.0)
    assert math.isnan(F.explained_variance(returns, returns * 0, keep, alone))


def test_the_critic_waits_for_the_kl_only_when_it_is_in_the_reward():
    assert build("ppo").critic_passes == ("values",)
    everything = ("old_logprobs", "ref_logprobs", "values")
    in_reward = build("ppo", kl_coef=0.1)
    in_loss = build("ppo", kl_coef=0.1, kl_placement="loss")
    assert in_reward.passes == in_loss.passes == in_reward.critic_passes == everything
    assert in_loss.critic_passes == ("values",)


def test_missing_values_are_named():
    algorithm = build("ppo")
    with pytest.raises(ValueError, match="run the values pass"):
        algorithm.returns(replace(inputs_of(algorithm), values_M=None))
