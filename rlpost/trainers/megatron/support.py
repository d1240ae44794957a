"""Top ids of a distribution, and the exact divergence of two, with the vocabulary cut over ranks.

Letters and chunks as in logprobs.py; the teacher's hidden size may differ from the student's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlpost.distillation.divergence import Kind, slopes, terms
from rlpost.trainers.megatron.logprobs import VocabShard, chunk_logits, chunks, local_columns


@dataclass(frozen=True)
class Scores:
    """Log-probs at the ids asked for [M, J], and the K likeliest ids with theirs [M, K]."""

    logprobs_MJ: torch.Tensor
    top_ids_MK: torch.Tensor
    top_logprobs_MK: torch.Tensor


@torch.no_grad()
def score(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    ids_MJ: torch.Tensor,
    *,
    top: int,
    shard: VocabShard,
    temperature: float,
    chunk: int,
) -> Scores:
    """One pass over the logits, without gradients; equal on all ranks of the shard's group.

    `top` is the K of the likeliest ids, at most `shard.size`; 0 asks for none.
    """
    parts = [
        _score_chunk(
            chunk_logits(hidden_MH[rows], weight_VH, shard, temperature), ids_MJ[rows], top, shard
        )
        for rows in chunks(len(hidden_MH), chunk)
    ]
    if not parts:
        none_MK = hidden_MH.new_zeros((0, top), dtype=torch.float32)
        return Scores(ids_MJ.float(), none_MK.long(), none_MK)
    logprobs, ids, top_logprobs = (torch.cat(part) for part in zip(*parts, strict=True))
    return Scores(logprobs, ids, top_logprobs)


def _score_chunk(
    logits: torch.Tensor, ids: torch.Tensor, top: int, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lse = log_sum_exp(logits, shard)[:, None]
    local, mine = local_columns(ids, logits, shard)
    picked = logits.gather(1, local).masked_fill_(~mine, 0.0)
    if shard.group is not None:
        dist.all_reduce(picked, group=shard.group)
    values, columns = logits.topk(min(top, logits.shape[1]), dim=1)
    values, columns = _merge(values, columns + shard.first, shard, top)
    return picked - lse, columns, values - lse


def log_sum_exp(logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """[M] over the whole vocabulary."""
    lse = logits.logsumexp(dim=1)
    if shard.group is None:
        return lse
    return torch.stack(_gathered(lse, shard)).logsumexp(dim=0)


def _merge(
    values: torch.Tensor, ids: torch.Tensor, shard: VocabShard, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest of all ranks' likeliest; every rank sees the same candidates in one order."""
    if shard.group is None:
        return values, ids
    values = torch.cat(_gathered(values, shard), dim=1)
    ids = torch.cat(_gathered(ids, shard), dim=1)
    best, order = values.topk(top, dim=1)
    return best, ids.gather(1, order)


def _gathered(values: torch.Tensor, shard: VocabShard) -> list[torch.Tensor]:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(parts, values.contiguous(), group=shard.group)
    return parts


@dataclass(frozen=True)
class Frozen:
    """The teacher's side: hidden states, its rows of its own head, its temperature."""

    hidden_MH: torch.Tensor
    weight_VH: torch.Tensor
    temperature: float


def full_divergence(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    teacher: Frozen,
    *,
    kind: Kind,
    beta: float | None,
    shard: VocabShard,
    temperature: float,
    chunk: int,
) -> torch.Tensor:
    """[M] exact divergence from the teacher, differentiable in the student's tensors.

    Student and teacher cut the same vocabulary alike. The logits of both live for one chunk.
    """
    value_M: torch.Tensor = _FullDivergence.apply(  # type: ignore[no-untyped-call]
        hidden_MH, weight_VH, teacher, kind, beta, shard, temperature, chunk
    )
    return value_M


class _FullDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher: Frozen,
        kind: Kind,
        beta: float | None,
        shard: VocabShard,
        temperature: float,
        chunk: int,
    ) -> torch.Tensor:
        # log-sum-exp of student and teacher, divergence, sum of slopes
        stats = hidden.new_empty((4, len(hidden)), dtype=torch.float32)
        for rows in chunks(len(hidden), chunk):
            log_p = chunk_logits(hidden[rows], weight, shard, temperature)
            log_q = _teacher_logits(teacher, rows, shard)
            lse_p, lse_q = log_sum_exp(log_p, shard), log_sum_exp(log_q, shard)
            log_p.sub_(lse_p[:, None])
            log_q.sub_(lse_q[:, None])
            sums = torch.stack(
                [
                    _real(terms(log_p, log_q, kind=kind, beta=beta), shard).sum(dim=1),
                    _real(slopes(log_p, log_q, kind=kind, beta=beta), shard).sum(dim=1),
                ]
            )
            if shard.group is not None:
                dist.all_reduce(sums, group=shard.group)
            stats[:, rows] = torch.cat([torch.stack([lse_p, lse_q]), sums])
        ctx.save_for_backward(hidden, weight, stats)
        ctx.settings = teacher, kind, beta, shard, temperature, chunk
        return stats[2].clone()

    @staticmethod
    def backward(ctx: Any, grad_M: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, stats = ctx.saved_tensors
        teacher, kind, beta, shard, temperature, chunk = ctx.settings
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for rows in chunks(len(hidden), chunk):
            lse_p, lse_q, _, total = stats[:, rows, None]
            log_p = chunk_logits(hidden[rows], weight, shard, temperature).sub_(lse_p)
            log_q = _teacher_logits(teacher, rows, shard).sub_(lse_q)
            slope = _real(slopes(log_p, log_q, kind=kind, beta=beta), shard)
            slope = slope.sub_(log_p.exp_().mul_(total)).mul_(grad_M[rows, None] / temperature)
            slope = slope.to(hidden.dtype)
            torch.mm(slope, weight, out=hidden_grad[rows])
            weight_grad += slope.t() @ hidden[rows]
        if shard.group is not None:
            dist.all_reduce(hidden_grad, group=shard.group)
        return hidden_grad, weight_grad.to(weight.dtype), *[None] * 6


def _teacher_logits(teacher: Frozen, rows: slice, shard: VocabShard) -> torch.Tensor:
    return chunk_logits(teacher.hidden_MH[rows], teacher.weight_VH, shard, teacher.temperature)


def _real(values: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Zero on the padding rows: there both sides are 0, and 0 * a huge difference is not."""
    padding = shard.first + values.shape[1] - shard.size
    if padding > 0:
        values[:, -padding:] = 0.0
    return values
