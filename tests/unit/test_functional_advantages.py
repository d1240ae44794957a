"""Advantages of groups and of tokens against plain Python loops."""

import math
import statistics
import threading

import pytest
import torch
from tensor_cases import LENGTHS, assert_close, double, noise, spans

from rlpost import functional as F

NAN = math.nan
REWARDS = [1.0, 0.0, 0.5, NAN, 2.0, 0.25, 0.25, 0.25, 7.0, NAN, 3.0]
GROUPS = ["a", "b", "a", "a", "b", "c", "c", "c", "d", "e", "a"]  # ragged and interleaved


def advantages_by_loop(formula, singleton):
    """`formula(reward, all present rewards of the group)` for groups that can be compared."""
    result = []
    for reward, group in zip(REWARDS, GROUPS, strict=True):
        peers = [
            r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group and not math.isnan(r)
        ]
        if math.isnan(reward):
            result.append(NAN)
        elif len(peers) == 1:
            result.append(reward if singleton == "raw" else 0.0)
        elif len(set(peers)) == 1:
            result.append(0.0)
        else:
            result.append(formula(reward, peers))
    return result


@pytest.mark.parametrize("singleton", ["zero", "raw"])
def test_group_advantages_equal_the_loops(singleton):
    def centered(r, peers):
        return r - sum(peers) / len(peers)

    def sample(r, peers):
        return centered(r, peers) / (statistics.stdev(peers) + 1e-6)

    def population(r, peers):
        return centered(r, peers) / (statistics.pstdev(peers) + 1e-6)

    def rloo(r, peers):
        return r - (sum(peers) - r) / (len(peers) - 1)

    rewards = double(REWARDS)
    for actual, formula in [
        (F.group_centered(rewards, GROUPS, singleton), centered),
        (F.group_normalized(rewards, GROUPS, "sample", singleton), sample),
        (F.group_normalized(rewards, GROUPS, "population", singleton), population),
        (F.leave_one_out(rewards, GROUPS, singleton), rloo),
    ]:
        assert_close(actual, advantages_by_loop(formula, singleton))


def test_equal_rewards_give_exactly_zero_in_spite_of_rounding():
    rewards = double([0.1, 0.1, 0.1])  # their float mean is not 0.1
    for actual in [
        F.group_normalized(rewards, ["a"] * 3, "sample", "raw"),
        F.group_centered(rewards, ["a"] * 3, "raw"),
        F.leave_one_out(rewards, ["a"] * 3, "raw"),
    ]:
        assert actual.tolist() == [0.0, 0.0, 0.0]


def test_infinite_reward_is_refused():
    with pytest.raises(ValueError, match="infinite"):
        F.group_stats(double([1.0, math.inf]), ["a", "a"])


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.1])
def test_return_to_go_equals_the_loop(gamma):
    rewards, lengths = noise(1), torch.tensor(LENGTHS)
    expected = [
        sum(gamma ** (later - t) * rewards[later] for later in span if later >= t)
        for span in spans()
        for t in span
    ]
    assert_close(F.return_to_go(double(rewards), lengths, gamma), expected)


def test_reward_lands_on_the_last_loss_token():
    placed = F.at_last_token(double([1, 2, 3, 4, 5]), torch.tensor(LENGTHS))
    assert placed.tolist() == [0, 0, 1, 2, 0, 0, 0, 4, 0, 5]


def on_ranks(parts, function):
    """Runs `function(part, reduce_sum)` for each rank in a thread; reduce_sum really waits."""
    slots, barrier, results = [None] * len(parts), threading.Barrier(len(parts)), {}

    def rank(number):
        def reduce_sum(tensor):
            slots[number] = tensor
            barrier.wait(10)
            total = sum(slots)
            barrier.wait(10)
            return total

        results[number] = function(parts[number], reduce_sum)

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [results[n] for n in range(len(parts))]


def test_whitening_uses_one_mean_and_std_on_all_ranks():
    values, keep = noise(2), [True] * 7 + [False] * 3
    kept = [v for v, k in zip(values, keep, strict=True) if k]
    mean, std = statistics.mean(kept), statistics.pstdev(kept)
    expected = [(v - mean) / (std + 1e-6) * k for v, k in zip(values, keep, strict=True)]
    cuts = [slice(0, 2), slice(2, 2), slice(2, 10)]  # one rank has no tokens
    parts = [(double(values)[cut], torch.tensor(keep)[cut]) for cut in cuts]
    actual = on_ranks(parts, lambda part, reduce_sum: F.whiten(*part, reduce_sum))
    assert_close(torch.cat(actual), expected)
