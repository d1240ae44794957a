"""Divergences against plain loops, and against autograd on the plain formula."""

import math

import pytest
import torch

from rlpost.distillation.divergence import slopes, support_divergence, terms

KINDS = [("reverse_kl", None), ("forward_kl", None), ("jsd", 0.5), ("jsd", 0.1)]
TAILS = ["bucket", "renormalize", "drop"]


def distributions(tokens=6, vocab=9, dtype=torch.float64):
    torch.manual_seed(0)
    logits = torch.randn(tokens, vocab, dtype=dtype) * 2
    return logits.requires_grad_(), (torch.randn(tokens, vocab, dtype=dtype) * 2).log_softmax(1)


def by_loops(p, q, kind, beta):
    """Of two lists of probabilities."""
    total = 0.0
    for a, b in zip(p, q, strict=True):
        m = None if beta is None else beta * b + (1 - beta) * a
        total += {
            "reverse_kl": lambda a=a, b=b: a * math.log(a / b),
            "forward_kl": lambda a=a, b=b: b * math.log(b / a),
            "jsd": lambda a=a, b=b, m=m: (
                beta * b * math.log(b / m) + (1 - beta) * a * math.log(a / m)
            ),
        }[kind]()
    return total


def with_tail(p, support, tail):
    inside = [p[i] for i in support]
    if tail == "renormalize":
        return [value / sum(inside) for value in inside]
    return [*inside, 1 - sum(inside)] if tail == "bucket" else inside


def on_support(log_p, log_q, ids, kind, beta, tail):
    ids = torch.tensor(ids)
    picked = ids.clamp(min=0)
    return support_divergence(
        log_p.gather(1, picked), log_q.gather(1, picked), ids >= 0, kind=kind, beta=beta, tail=tail
    )


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("tail", TAILS)
def test_a_support_gives_what_loops_over_probabilities_give(kind, beta, tail):
    logits, log_q = distributions()
    log_p = logits.log_softmax(1)
    ids = [[0, 3, 4], [8, 1, -1], [2, 5, 7], [1, 0, 8], [6, -1, -1], [4, 5, 6]]
    found = on_support(log_p, log_q, ids, kind, beta, tail)
    for row, support in enumerate(ids):
        support = [i for i in support if i >= 0]
        p, q = (with_tail(side[row].exp().tolist(), support, tail) for side in (log_p, log_q))
        assert found[row].item() == pytest.approx(by_loops(p, q, kind, beta), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("tail", TAILS)
def test_the_whole_vocabulary_as_support_equals_the_full_divergence(kind, beta, tail, dtype):
    """Value and gradient, whatever the tail rule."""
    logits, log_q = distributions(dtype=dtype)
    ids = [list(range(9))] * 6
    full = terms(logits.log_softmax(1), log_q, kind=kind, beta=beta).sum(1)
    on_all = on_support(logits.log_softmax(1), log_q, ids, kind, beta, tail)
    torch.testing.assert_close(on_all, full, rtol=0, atol=1e-6)
    (expected,) = torch.autograd.grad(full.sum(), logits)
    (found,) = torch.autograd.grad(on_all.sum(), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_slopes_give_autograds_gradient_of_the_full_divergence(kind, beta):
    logits, log_q = distributions()
    log_p = logits.log_softmax(1)
    (expected,) = torch.autograd.grad(terms(log_p, log_q, kind=kind, beta=beta).sum(), logits)
    slope = slopes(log_p, log_q, kind=kind, beta=beta)
    torch.testing.assert_close(slope - log_p.exp() * slope.sum(1, keepdim=True), expected)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("tail", TAILS)
def test_equal_distributions_have_no_divergence_and_no_gradient(kind, beta, tail):
    logits, _ = distributions()
    log_q = logits.detach().log_softmax(1)
    value = on_support(logits.log_softmax(1), log_q, [[0, 1, 2]] * 6, kind, beta, tail)
    assert value.abs().max() < 1e-9
    if tail != "drop":  # without the tail, mass leaves the support even at p = q
        assert torch.autograd.grad(value.sum(), logits)[0].abs().max() < 1e-9


def test_without_a_tail_mass_drains_out_of_the_support_and_with_a_bucket_it_does_not():
    """The teacher is the student: a step along the gradient must not lower the mass on S."""
    for tail, drains in (("drop", True), ("bucket", False)):
        logits, _ = distributions()
        log_q = logits.detach().log_softmax(1)
        ids = [[0, 1]] * 6
        value = on_support(logits.log_softmax(1), log_q, ids, "reverse_kl", None, tail)
        (slope,) = torch.autograd.grad(value.sum(), logits)
        before = logits.softmax(1)[:, :2].sum()
        after = (logits - 0.1 * slope).softmax(1)[:, :2].sum()
        assert (after < before - 1e-4) == drains


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_a_support_that_rounds_to_everything_stays_finite(kind, beta):
    """All mass on one id: what is left over is below what float32 can tell from 0."""
    logits = torch.zeros(1, 5).index_fill(1, torch.tensor([2]), 60.0).requires_grad_()
    log_q = torch.zeros(1, 5).log_softmax(1)
    value = on_support(logits.log_softmax(1), log_q, [[2, 0]], kind, beta, "bucket")
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(logits.grad).all()


def test_a_missing_teacher_shows_as_nan():
    logits, log_q = distributions()
    log_q = log_q.clone().fill_(math.nan)
    assert (
        on_support(logits.log_softmax(1), log_q, [[0, 1]] * 6, "jsd", 0.5, "bucket").isnan().all()
    )
