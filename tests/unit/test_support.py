"""Top ids, log-probs at given ids and full divergences against dense formulas."""

import pytest
import torch

from rlpost.distillation.divergence import support_divergence, terms
from rlpost.trainers.megatron.logprobs import (
    VocabShard,
    logprobs_and_entropy,
    support_logprobs,
)
from rlpost.trainers.megatron.support import Frozen, full_divergence, score

VOCAB, PADDED, TOKENS = 37, 48, 23
SHARD = VocabShard(first=0, size=VOCAB, group=None)
KINDS = [("reverse_kl", None), ("forward_kl", None), ("jsd", 0.3)]


def sides():
    """Student (hidden size 16) and teacher (hidden size 24), padding rows of wild weights."""
    torch.manual_seed(0)
    student = [torch.randn(TOKENS, 16), torch.randn(PADDED, 16) / 3]
    teacher = [torch.randn(TOKENS, 24), torch.randn(PADDED, 24) / 3]
    for _, weight in (student, teacher):
        weight[VOCAB:] = 1e3
    return [part.requires_grad_() for part in student], teacher


def dense(hidden, weight, temperature):
    return ((hidden @ weight[:VOCAB].t()) / temperature).log_softmax(1)


@pytest.mark.parametrize("chunk", [5, 1000])
def test_logprobs_at_many_ids_equal_a_dense_log_softmax_with_gradients(chunk):
    """Repeated ids add up, absent ones (-1) are ignored."""
    (hidden, weight), _ = sides()
    ids = torch.randint(0, VOCAB, (TOKENS, 6))
    ids[:, 1] = ids[:, 0]
    ids[::2, 5] = -1
    weights = torch.randn(TOKENS, 6) * (ids >= 0)
    found, entropy = support_logprobs(
        hidden, weight, ids, shard=SHARD, temperature=0.7, chunk=chunk
    )
    full = dense(hidden, weight, 0.7)
    expected = full.gather(1, ids.clamp(min=0))
    torch.testing.assert_close(found[ids >= 0], expected[ids >= 0], rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad((weights * found).sum() + entropy.sum(), [hidden, weight])
    plain = (weights * expected).sum() - (full.exp() * full).sum()
    for one, other in zip(ours, torch.autograd.grad(plain, [hidden, weight]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [5, 1000])
@pytest.mark.parametrize("top", [0, 4, VOCAB])
def test_scores_are_the_likeliest_ids_and_the_logprobs_asked_for(chunk, top):
    (hidden, weight), _ = sides()
    targets = torch.randint(0, VOCAB, (TOKENS, 1))
    found = score(hidden, weight, targets, top=top, shard=SHARD, temperature=0.7, chunk=chunk)
    full = dense(hidden, weight, 0.7)
    torch.testing.assert_close(found.logprobs_MJ, full.gather(1, targets), rtol=1e-5, atol=1e-5)
    values, ids = full.topk(top, dim=1)
    assert torch.equal(found.top_ids_MK, ids)
    torch.testing.assert_close(found.top_logprobs_MK, values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [5, 1000])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_a_chunked_full_divergence_equals_autograd_on_the_plain_formula(kind, beta, chunk):
    (hidden, weight), teacher = sides()
    weights = torch.randn(TOKENS)
    found = full_divergence(
        hidden,
        weight,
        Frozen(*teacher, temperature=1.3),
        kind=kind,
        beta=beta,
        shard=SHARD,
        temperature=0.7,
        chunk=chunk,
    )
    log_p, log_q = dense(hidden, weight, 0.7), dense(*teacher, 1.3)
    plain = terms(log_p, log_q, kind=kind, beta=beta).sum(1)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    ours = torch.autograd.grad((weights * found).sum(), [hidden, weight])
    for one, other in zip(
        ours, torch.autograd.grad((weights * plain).sum(), [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def peak_bytes(work):
    """Highest sum of live allocations while `work` runs, by the allocator's own events."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    live = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    return highest


def test_the_topk_loss_at_64_ids_takes_at_most_half_as_much_memory_again():
    tokens, width, vocab = 2048, 64, 4096
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    settings = {"shard": VocabShard(0, vocab, None), "temperature": 1.0, "chunk": 512}
    ids = torch.randint(0, vocab, (tokens, 65))
    teacher = torch.full((tokens, 64), -8.0)
    present = torch.ones(tokens, 64, dtype=torch.bool)

    def plain():
        logprobs, entropy = logprobs_and_entropy(hidden, weight, ids[:, 0], **settings)
        (logprobs.sum() + entropy.sum()).backward()

    def many():
        logprobs, entropy = support_logprobs(hidden, weight, ids, **settings)
        loss = support_divergence(
            logprobs[:, 1:], teacher, present, kind="reverse_kl", beta=None, tail="bucket"
        )
        (logprobs[:, 0].sum() + loss.sum() + entropy.sum()).backward()

    plain(), many()  # gradients of the leaves are there before anything is measured
    one, all_ = peak_bytes(plain), peak_bytes(many)
    print(f"{all_ / one:.2f} x")
    assert one > 4 * 512 * vocab  # a chunk of logits was seen
    assert all_ <= 1.5 * one
