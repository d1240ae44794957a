"""Ratios, surrogates, corrections, KL and weights against plain Python loops."""

import math

import pytest
import torch
from tensor_cases import LENGTHS, assert_close, double, noise, spans

from rlpost import functional as F

NAN = math.nan
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
