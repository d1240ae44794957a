"""Log-probs and entropy from hidden states, in chunks, with the vocabulary cut over ranks.

Letters: M loss tokens, H hidden size, V rows of the head on this rank (padding included).

With logits x = (h @ W^T) / temperature, lse = log sum_v exp(x_v), mean = sum_v p_v x_v:

    logprob = x_target - lse          d logprob / dx = onehot(target) - p
    entropy = lse - mean              d entropy / dx = -p * (x - mean)

The logits of a chunk live only while it is worked on: the backward pass computes them again from
the saved lse, so no more than `chunk` x V of them exist at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    logprobs_M, entropy_M = _LogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_MH, weight_VH, targets_M, shard, temperature, chunk
    )
    return logprobs_M, entropy_M


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        shard: VocabShard,
        temperature: float,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stats = hidden.new_empty((3, len(hidden)), dtype=torch.float32)  # lse, mean, target logit
        for rows in _chunks(len(hidden), chunk):
            logits = _logits(hidden[rows], weight, shard, temperature)
            stats[:, rows] = _stats(logits, targets[rows], shard)
        lse, mean, target = stats
        ctx.save_for_backward(hidden, weight, targets, lse, mean)
        ctx.settings = shard, temperature, chunk
        return target - lse, lse - mean

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, lse, mean = ctx.saved_tensors
        shard, temperature, chunk = ctx.settings
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(len(hidden), chunk):
            logits = _logits(hidden[rows], weight, shard, temperature)
            stats = torch.stack([part[rows] for part in (lse, mean, *grads)])
            slope = _slope(logits, targets[rows], stats, shard).div_(temperature).to(hidden.dtype)
            torch.mm(slope, weight, out=hidden_grad[rows])
            weight_grad += slope.t() @ hidden[rows]
        if shard.group is not None:
            dist.all_reduce(hidden_grad, group=shard.group)
        return hidden_grad, weight_grad.to(weight.dtype), None, None, None, None


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, length, chunk)]


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, shard: VocabShard, temperature: float
) -> torch.Tensor:
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits.div_(temperature)
    padding = shard.first + logits.shape[1] - shard.size
    if padding > 0:
        logits[:, -padding:] = ABSENT
    return logits


def _stats(logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """[3, M]: log-sum-exp, mean logit under p, logit of the target; over the whole vocabulary."""
    top = logits.amax(dim=1)
    if shard.group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
    weights = (logits - top[:, None]).exp_()
    local, mine = _local(targets, logits, shard)
    parts = torch.stack(
        [
            weights.sum(dim=1),
            torch.linalg.vecdot(weights, logits),
            logits.gather(1, local).squeeze(1).masked_fill(~mine, 0.0),
        ]
    )
    if shard.group is not None:
        dist.all_reduce(parts, group=shard.group)
    total, weighted, target = parts
    return torch.stack([top + total.log(), weighted / total, target])


def _slope(
    logits: torch.Tensor, targets: torch.Tensor, stats: torch.Tensor, shard: VocabShard
) -> torch.Tensor:
    """d loss / d logits on this rank's rows: [M, V]. Overwrites `logits`.

    `stats` [4, M]: lse, mean, and the gradients of the log-probs and of the entropy.
    """
    lse, mean, logprob_grad, entropy_grad = stats
    probs = (logits - lse[:, None]).exp_()
    factor = logits.sub_(mean[:, None]).mul_(-entropy_grad[:, None]).sub_(logprob_grad[:, None])
    slope: torch.Tensor = probs.mul_(factor)
    local, mine = _local(targets, logits, shard)
    slope.scatter_add_(1, local, (logprob_grad * mine)[:, None])
    return slope


def _local(
    targets: torch.Tensor, logits: torch.Tensor, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each target on this rank [M, 1], whether it lies here [M])."""
    local = targets - shard.first
    mine = (local >= 0) & (local < logits.shape[1])
    return local.clamp(0, logits.shape[1] - 1)[:, None], mine
