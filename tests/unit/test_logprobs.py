import pytest
import torch

from rlpost.trainers.megatron.logprobs import VocabShard, logprobs_and_entropy

VOCAB, PADDED, HIDDEN, TOKENS = 37, 48, 16, 23


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(PADDED, HIDDEN, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,))


def dense(hidden, weight, targets, temperature):
    logprobs = torch.log_softmax((hidden @ weight[:VOCAB].t()).float() / temperature, dim=1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy


def chunked(hidden, weight, targets, temperature, chunk=7):
    shard = VocabShard(first=0, size=VOCAB, group=None)
    return logprobs_and_entropy(
        hidden, weight, targets, shard=shard, temperature=temperature, chunk=chunk
    )


def gradients(function, temperature, **options):
    hidden, weight, targets = inputs()
    logprobs, entropy = function(hidden, weight, targets, temperature, **options)
    numbers = torch.Generator().manual_seed(1)
    weights = torch.randn(2, TOKENS, generator=numbers)
    ((weights[0] * logprobs).sum() + (weights[1] * entropy).sum()).backward()
    return hidden.grad, weight.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_values_equal_a_dense_log_softmax(temperature, chunk):
    for ours, reference in zip(
        chunked(*inputs(), temperature, chunk), dense(*inputs(), temperature), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_of_logprobs_and_entropy_equal_autograd(temperature):
    for ours, reference in zip(
        gradients(chunked, temperature), gradients(dense, temperature), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def test_padding_rows_of_the_vocabulary_get_no_probability_and_no_gradient():
    hidden, weight, targets = inputs()
    with torch.no_grad():
        weight[VOCAB:] = 1e3
    logprobs, entropy = chunked(hidden, weight, targets, 1.0)
    torch.testing.assert_close(logprobs, dense(hidden, weight, targets, 1.0)[0])
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.count_nonzero(weight.grad[VOCAB:]) == 0
    assert torch.isfinite(weight.grad).all()


def test_no_loss_tokens_give_empty_results_and_zero_gradients():
    hidden, weight, targets = inputs()
    logprobs, entropy = chunked(hidden[:0], weight, targets[:0], 1.0)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert torch.count_nonzero(weight.grad) == 0


def test_half_precision_results_are_float32():
    logprobs, entropy = chunked(*inputs(torch.bfloat16), 1.0)
    reference = dense(*inputs(torch.bfloat16), 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, reference[0], rtol=1e-3, atol=1e-3)
