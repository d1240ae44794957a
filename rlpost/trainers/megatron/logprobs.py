"""Log-probs and entropy from hidden states, in chunks, with the vocabulary cut over ranks.

Letters: M loss tokens, K ids asked for at each, H hidden size, V rows of the head on this rank
(padding included).

With logits x = (h @ W^T) / temperature, lse = log sum_v exp(x_v), mean = sum_v p_v x_v:

    logprob = x_id - lse              d logprob / dx = onehot(id) - p
    entropy = lse - mean              d entropy / dx = -p * (x - mean)

The logits of a chunk live only while it is worked on: the backward pass computes them again from
the saved lse, so no more than `chunk` x V of them exist at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Logit of a padding row. Finite, so that 0 * x stays 0 where -inf would give NaN.
ABSENT = -1e30


@dataclass(frozen=True)
class VocabShard:
    """Rows `first` .. `first + V - 1` of the vocabulary lie on this rank; from `size` on: padding.

    `group`: the ranks that hold the other rows; None where one rank holds all. The gradient of h is
    summed over it here, so that whatever made h need not.
    """

    first: int
    size: int
    group: ProcessGroup | None


def logprobs_and_entropy(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    shard: VocabShard,
    temperature: float,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p(target) [M], full-vocabulary entropy in nats [M]), float32, differentiable.

    Equal on all ranks of the shard's group. `targets_M` are ids below `shard.size`.
    """
    logprobs_M1, entropy_M = support_logprobs(
        hidden_MH, weight_VH, targets_M[:, None], shard=shard, temperature=temperature, chunk=chunk
    )
    return logprobs_M1[:, 0], entropy_M


def support_logprobs(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    ids_MK: torch.Tensor,
    *,
    shard: VocabShard,
    temperature: float,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p(id) [M, K], entropy [M]) as logprobs_and_entropy, for K ids of each token at once.

    The logits are made once for all of them and never copied per id. A negative id stands for
    none: its value is finite, means nothing, and must get no gradient.
    """
    logprobs_MK, entropy_M = _LogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_MH, weight_VH, ids_MK, shard, temperature, chunk
    )
    return logprobs_MK, entropy_M


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        ids: torch.Tensor,
        shard: VocabShard,
        temperature: float,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # log-sum-exp, mean, logits at the ids
        stats = hidden.new_empty((2 + ids.shape[1], len(hidden)), dtype=torch.float32)
        for rows in chunks(len(hidden), chunk):
            logits = chunk_logits(hidden[rows], weight, shard, temperature)
            stats[:, rows] = _stats(logits, ids[rows], shard)
        lse, mean, picked = stats[0], stats[1], stats[2:]
        ctx.save_for_backward(hidden, weight, ids, lse, mean)
        ctx.settings = shard, temperature, chunk
        return (picked - lse).t(), lse - mean

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, ids, lse, mean = ctx.saved_tensors
        shard, temperature, chunk = ctx.settings
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for rows in chunks(len(hidden), chunk):
            logits = chunk_logits(hidden[rows], weight, shard, temperature)
            given = _Given(lse[rows], mean[rows], *(grad[rows] for grad in grads))
            slope = _slope(logits, ids[rows], given, shard).div_(temperature).to(hidden.dtype)
            torch.mm(slope, weight, out=hidden_grad[rows])
            weight_grad += slope.t() @ hidden[rows]
        if shard.group is not None:
            dist.all_reduce(hidden_grad, group=shard.group)
        return hidden_grad, weight_grad.to(weight.dtype), None, None, None, None


def chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, length, chunk)]


def chunk_logits(
    hidden: torch.Tensor, weight: torch.Tensor, shard: VocabShard, temperature: float
) -> torch.Tensor:
    """[M, V] float32 at this temperature; ABSENT on the padding rows."""
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits.div_(temperature)
    padding = shard.first + logits.shape[1] - shard.size
    if padding > 0:
        logits[:, -padding:] = ABSENT
    return logits


def _stats(logits: torch.Tensor, ids: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """[2 + K, M]: log-sum-exp, mean logit under p, logits at the ids; over the whole vocabulary."""
    top = logits.amax(dim=1)
    if shard.group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
    weights = (logits - top[:, None]).exp_()
    local, mine = local_columns(ids, logits, shard)
    totals = torch.stack([weights.sum(dim=1), torch.linalg.vecdot(weights, logits)])
    parts = torch.cat([totals, logits.gather(1, local).masked_fill_(~mine, 0.0).t()])
    if shard.group is not None:
        dist.all_reduce(parts, group=shard.group)
    total, weighted = parts[:2].clone()
    parts[0], parts[1] = top + total.log(), weighted / total
    return parts


class _Given(NamedTuple):
    """What the backward pass has of a chunk of tokens: saved values, and the incoming gradients."""

    lse: torch.Tensor
    mean: torch.Tensor
    logprobs_grad: torch.Tensor  # [M, K]
    entropy_grad: torch.Tensor


def _slope(
    logits: torch.Tensor, ids: torch.Tensor, given: _Given, shard: VocabShard
) -> torch.Tensor:
    """d loss / d logits on this rank's rows: [M, V]. Overwrites `logits`."""
    probs = (logits - given.lse[:, None]).exp_()
    factor = logits.sub_(given.mean[:, None]).mul_(-given.entropy_grad[:, None])
    factor.sub_(given.logprobs_grad.sum(dim=1, keepdim=True))
    slope: torch.Tensor = probs.mul_(factor)
    local, mine = local_columns(ids, logits, shard)
    slope.scatter_add_(1, local, given.logprobs_grad * mine)
    return slope


def local_columns(
    ids: torch.Tensor, logits: torch.Tensor, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each id on this rank [M, K], whether it lies here [M, K])."""
    local = ids - shard.first
    mine = (ids >= 0) & (local >= 0) & (local < logits.shape[1])
    return local.clamp(0, logits.shape[1] - 1), mine
