"""Every formula of rlpost.functional against a plain Python loop."""

import math
import random
import statistics
import threading

import pytest
import torch

from rlpost import functional as F

NAN = math.nan
LENGTHS = [3, 1, 0, 4, 2]  # a sequence without loss tokens must disturb no one
REWARDS = [1.0, 0.0, 0.5, NAN, 2.0, 0.25, 0.25, 0.25, 7.0, NAN, 3.0]
GROUPS = ["a", "b", "a", "a", "b", "c", "c", "c", "d", "e", "a"]  # ragged and interleaved


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def noise(seed, low=-2.0, high=0.0):
    source = random.Random(seed)
    return [source.uniform(low, high) for _ in range(sum(LENGTHS))]


def spans(lengths=LENGTHS):
    start = 0
    for length in lengths:
        yield range(start, start + length)
        start += length


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


def assert_close(actual, expected):
    torch.testing.assert_close(
        actual.double(), double(expected), equal_nan=True, rtol=1e-9, atol=1e-9
    )


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


RATIOS = [0.2, 0.79, 0.9, 1.0, 1.1, 1.29, 2.0, 9.0]
SIGNED = [1.5, -0.5, 0.0]


def clip(value, low, high):
    return min(max(value, low), high)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_ppo_clip_equals_the_loop(dual_clip):
    def loss(ratio, advantage):
        objective = min(ratio * advantage, clip(ratio, 0.8, 1.28) * advantage)
        if dual_clip is not None and advantage < 0:
            objective = max(objective, dual_clip * advantage)
        return -objective

    pairs = [(r, a) for r in RATIOS for a in SIGNED]
    ratio, advantage = (double(column) for column in zip(*pairs, strict=True))
    actual = F.ppo_clip(ratio, advantage, 0.2, 0.28, dual_clip)
    assert_close(actual, [loss(r, a) for r, a in pairs])


def test_dual_clip_stops_the_gradient_of_a_huge_ratio():
    ratio = double([9.0, 2.0]).requires_grad_()
    F.ppo_clip(ratio, double([-1.0, -1.0]), 0.2, 0.28, 3.0).sum().backward()
    assert ratio.grad.tolist() == [0.0, 1.0]


def test_ppo_gradient_is_the_policy_gradient_inside_the_clip_and_zero_outside():
    logprobs = double([-1.0, -1.0, -1.0]).requires_grad_()
    old = double([-1.0, -1.5, -0.5])
    ratio, _ = F.token_ratio(logprobs, old)
    F.ppo_clip(ratio, double([2.0, 2.0, -2.0]), 0.2, 0.2, None).sum().backward()
    assert_close(logprobs.grad, [-2.0, 0.0, 0.0])


def test_cispo_weighs_the_logprob_gradient_with_the_clipped_ratio():
    logprobs = double(noise(3)).requires_grad_()
    old, advantages = noise(4), noise(5, low=-1, high=1)
    ratio, _ = F.token_ratio(logprobs, double(old))
    loss = F.cispo(ratio, logprobs, double(advantages), 0.5, 0.3)
    loss.sum().backward()
    weights = [
        clip(math.exp(new - o), 0.5, 1.3) * a
        for new, o, a in zip(noise(3), old, advantages, strict=True)
    ]
    assert_close(logprobs.grad, [-w for w in weights])
    assert_close(loss.detach(), [-w * new for w, new in zip(weights, noise(3), strict=True)])


def test_gspo_ratio_is_the_mean_over_the_sequence_s_own_tokens():
    new, old = noise(6), noise(7)
    sequence = F.sequence_numbers(torch.tensor(LENGTHS))
    logprobs = double(new).requires_grad_()
    keep = torch.ones(len(new), dtype=torch.bool)
    keep[4] = False  # first token of the fourth sequence
    ratio = F.sequence_ratio(logprobs, double(old), keep, sequence, len(LENGTHS))
    expected = []
    for span in spans():
        own = [new[t] - old[t] for t in span if t != 4]
        expected += [math.exp(sum(own) / max(len(own), 1))] * len(span)
    assert_close(ratio.detach(), expected)
    ratio.sum().backward()
    expected[4] = 0.0
    assert_close(logprobs.grad, expected)


def test_ratio_that_is_not_finite_is_dropped_without_a_nan_gradient():
    logprobs = torch.tensor([-1.0, -torch.inf, NAN, 500.0, -1.0], requires_grad=True)
    ratio, keep = F.token_ratio(logprobs, torch.tensor([-1.0, -1.0, -1.0, -1.0, NAN]))
    assert keep.tolist() == [True, False, False, False, False]
    ratio.sum().backward()
    assert logprobs.grad.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("sequence_mean", [None, "geometric", "product"])
def test_correction_weights_equal_the_loop(sequence_mean):
    old, roll = noise(8), noise(9)
    roll[6] = NAN  # in the fourth sequence
    log_w, keep = F.correction_log_weights(
        double(old),
        double(roll),
        F.sequence_numbers(torch.tensor(LENGTHS)),
        len(LENGTHS),
        sequence_mean,
    )
    assert [t for t, kept in enumerate(keep.tolist()) if not kept] == [6]
    weights = []
    for span in spans():
        own = {t: math.exp(old[t] - roll[t]) for t in span if t != 6}
        if sequence_mean is None:
            weights += [own.get(t, 1.0) for t in span]
        else:
            power = 1 / len(own) if sequence_mean == "geometric" and own else 1.0
            weights += [math.prod(own.values()) ** power] * len(span)
    assert_close(log_w.exp(), weights)
    assert_close(F.truncated_weights(log_w, 1.2), [min(w, 1.2) for w in weights])
    assert_close(F.mask_weights(log_w, 0.5, 1.2), [float(0.5 <= w <= 1.2) for w in weights])


def test_sequence_product_that_overflows_is_truncated_not_infinite():
    assert F.truncated_weights(torch.tensor([2000.0]), 2.0).tolist() == [2.0]
    assert F.mask_weights(torch.tensor([2000.0]), 0.5, 2.0).tolist() == [0.0]


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", lambda d: d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: math.exp(-d) + d - 1, lambda d: 1 - math.exp(-d)),
    ],
)
def test_kl_estimators_and_their_gradients(estimator, value, slope):
    new, ref = noise(10), noise(11)
    logprobs = double(new).requires_grad_()
    kl, _ = F.kl_estimate(logprobs, double(ref), estimator)
    kl.sum().backward()
    differences = [n - r for n, r in zip(new, ref, strict=True)]
    assert_close(kl.detach(), [value(d) for d in differences])
    assert_close(logprobs.grad, [slope(d) for d in differences])


def test_k1_and_k3_average_to_the_exact_kl():
    policy, reference = double([0.7, 0.2, 0.1]), double([0.2, 0.3, 0.5])
    exact = (policy * (policy / reference).log()).sum()
    for estimator in ("k1", "k3"):
        kl, _ = F.kl_estimate(policy.log(), reference.log(), estimator)
        torch.testing.assert_close((policy * kl).sum(), exact)


def test_kl_that_is_not_finite_is_dropped():
    ref = torch.tensor([-1.0, NAN, -torch.inf, 300.0])
    kl, keep = F.kl_estimate(torch.full((4,), -1.0), ref, "k3")
    assert keep.tolist() == [True, False, False, False]
    assert kl.isfinite().all()


def test_aggregation_weights_equal_the_definitions():
    losses, lengths = noise(12), torch.tensor(LENGTHS)
    tokens, sequences = sum(LENGTHS) + 7, len(LENGTHS) + 2  # the rest is on another rank
    sums = [sum(losses[t] for t in span) for span in spans()]
    means = [s / n for s, n in zip(sums, LENGTHS, strict=True) if n]
    for aggregation, norm_length, expected in [
        ("token_mean", None, sum(sums) / tokens),
        ("sequence_mean_token_mean", None, sum(means) / sequences),
        ("sequence_mean_token_sum", None, sum(sums) / sequences),
        ("sequence_mean_token_sum_norm", 16, sum(sums) / 16 / sequences),
    ]:
        weights = F.aggregation_weights(lengths, tokens, sequences, aggregation, norm_length)
        assert math.isclose((weights.double() @ double(losses)).item(), expected, rel_tol=1e-6)
