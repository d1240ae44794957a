"""Distillation in a trainer rank: what student and teacher answer in passes, and the loss term.

Letters as in packing.py; K ids of a support.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlpost.algorithms.base import Algorithm
from rlpost.distillation.base import NO_ID, Distillation, Divergent
from rlpost.distillation.topk import TopK
from rlpost.errors import TrainerError
from rlpost.metrics import Metric, mean
from rlpost.trainers.megatron import step
from rlpost.trainers.megatron.forward import Head
from rlpost.trainers.megatron.layout import Layout
from rlpost.trainers.megatron.packing import PackedBatch, Row
from rlpost.trainers.megatron.teacher import FrozenTeacher
from rlpost.types import Array

Share = list[tuple[PackedBatch, step.Targets]]
PolicyLoss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, Metric]]]


def student_columns(
    head: Head, hidden: torch.Tensor, batch: PackedBatch, *, column: str, top: int
) -> dict[str, Array]:
    """Log-probs as `column` and the student's `top` likeliest ids, chosen here and nowhere else."""
    scores = head.score(hidden, batch, None, top=top)
    return {column: numbers(scores.logprobs_MJ[:, 0]), "student_ids": ids(scores.top_ids_MK)}


def teacher_columns(
    head: Head, hidden: torch.Tensor, batch: PackedBatch, distillation: Distillation
) -> dict[str, Array]:
    """The teacher's answer: at the student's ids, then at its own top ids that are not among
    them (others: NO_ID). Log-probs are over the whole vocabulary at the teacher's temperature."""
    asked_MK = None
    if distillation.asks_student:
        asked_MK = step.to_device(batch.columns["student_ids"])
    scores = head.score(hidden, batch, asked_MK, top=distillation.asks_teacher)
    columns = {"teacher_logprobs": numbers(scores.logprobs_MJ[:, 0])}
    if not isinstance(distillation, Divergent):
        return columns
    own_MK = scores.top_ids_MK
    if asked_MK is not None:
        known_MK = (own_MK[:, :, None] == asked_MK[:, None, :]).any(dim=2)
        own_MK = torch.where(known_MK, NO_ID, own_MK)
        own_MK = torch.cat([asked_MK, own_MK], dim=1)
    logprobs_MK = torch.cat([scores.logprobs_MJ[:, 1:], scores.top_logprobs_MK], dim=1)
    return columns | {
        "teacher_ids": ids(own_MK),
        "teacher_top_logprobs": numbers(torch.where(own_MK == NO_ID, torch.nan, logprobs_MK)),
    }


def numbers(values: torch.Tensor) -> Array:
    return values.float().cpu().numpy()


def ids(values: torch.Tensor) -> Array:
    return values.to(torch.int32).cpu().numpy()


class Distiller:
    """The student's side in the actor: its advantages, and the distillation term of its loss.

    `teacher` is given when the teacher lives in this rank; `show` it each step's micro-batches.
    """

    def __init__(
        self,
        distillation: Distillation,
        *,
        head: Head,
        layout: Layout,
        teacher: FrozenTeacher | None,
    ) -> None:
        self.mode = distillation
        self.head = head
        self.layout = layout
        self.teacher = teacher
        self._weights: dict[PackedBatch, torch.Tensor] = {}
        self._states: dict[PackedBatch, torch.Tensor] = {}

    def join(self, shares: Mapping[Any, Share], algorithm: Algorithm) -> dict[Any, Share]:
        """The shares with the distillation's advantages; the weights of its term are kept.

        All data-parallel ranks call it with the same minibatches. Raises TrainerError when the
        teacher answered for other ids than the student's, or for no token of a minibatch.
        """
        joined = {key: [self._joined(*pair) for pair in share] for key, share in shares.items()}
        if isinstance(self.mode, Divergent):
            self._weights.clear()
            for share in joined.values():
                self._weigh([batch for batch, _ in share], algorithm)
        return joined

    def _joined(self, batch: PackedBatch, target: step.Targets) -> tuple[PackedBatch, step.Targets]:
        check_ids(batch, self.mode.asks_student)
        given = {
            name: step.to_device(batch.columns[name])
            for name in ("old_logprobs", "teacher_logprobs")
            if name in batch.columns
        }
        advantages_M = self.mode.advantages(
            target.targets_M, given["old_logprobs"], given.get("teacher_logprobs")
        )
        return batch, dataclasses.replace(target, targets_M=advantages_M)

    def _weigh(self, batches: Sequence[PackedBatch], algorithm: Algorithm) -> None:
        """The term is divided by its own count: the tokens that a teacher answered for."""
        lengths = [
            np.bincount(batch.sequence_M[known_tokens(batch)], minlength=len(batch.sample_ids))
            for batch in batches
        ]
        lengths_S = step.to_device(np.concatenate([np.zeros(0, np.int64), *lengths]))
        counts = torch.stack([lengths_S.sum(), (lengths_S > 0).sum()])
        tokens, sequences = self.layout.sum_over_data(counts).tolist()
        if tokens == 0:
            raise TrainerError("no teacher answered for any token of a minibatch")
        known_M = np.concatenate([np.zeros(0, bool), *(known_tokens(batch) for batch in batches)])
        weights_M = torch.zeros(len(known_M), device=lengths_S.device)
        weights_M[step.to_device(known_M)] = algorithm.aggregation_weights(
            lengths_S, tokens, sequences
        ).float()
        for batch, part_M in zip(batches, step.cut(weights_M, batches), strict=True):
            self._weights[batch] = part_M

    def show(self, batches: Sequence[PackedBatch], seen: Mapping[str, Row]) -> None:
        """Runs the teacher that lives here on this step's samples, as it `seen` them; keeps its
        hidden states until the next step."""
        if self.teacher is None:
            return
        shown = [self.teacher.batch_like(batch, seen) for batch in batches]
        states = self.teacher.states(shown)
        self._states = dict(zip(batches, states, strict=False))  # [] off the last stage

    def loss(
        self, hidden: torch.Tensor, batch: PackedBatch, policy_loss: PolicyLoss
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """L_policy + coef * L_distill, and the metrics of both."""
        if not isinstance(self.mode, Divergent):
            logprobs_M, entropy_M = self.head(hidden, batch)
            value, metrics = policy_loss(logprobs_M, entropy_M)
            return value, {**metrics, **gap_to_teacher(logprobs_M, batch)}
        if self.teacher is None:
            logprobs_M, entropy_M, term_M, measured = self._on_support(hidden, batch)
        else:
            logprobs_M, entropy_M = self.head(hidden, batch)
            term_M, measured = self._in_full(hidden, batch), {}
        value, metrics = policy_loss(logprobs_M, entropy_M)
        weights_M = self._weights[batch]
        term = (torch.where(weights_M > 0, term_M, 0.0) * weights_M).sum()
        value = value + self.mode.config.coef * term
        known = torch.where(weights_M > 0, term_M.detach(), 0.0).sum().item()
        return value, {
            **metrics,
            **measured,
            "train/loss": Metric("step_mean", value.item()),
            "distill/loss": Metric("step_mean", term.item()),
            "distill/divergence/mean": mean(known, int((weights_M > 0).sum())),
        }

    def _on_support(
        self, hidden: torch.Tensor, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Metric]]:
        assert isinstance(self.mode, TopK)
        ids_MK = step.to_device(batch.columns["teacher_ids"])
        teacher_MK = step.to_device(batch.columns["teacher_top_logprobs"])
        logprobs_M, entropy_M, at_ids_MK = self.head.at(hidden, batch, ids_MK)
        # Tokens without an answer have weight 0; here they only have to stay finite.
        unknown_M1 = ~step.to_device(known_tokens(batch))[:, None]
        term_M = self.mode.token_loss(
            at_ids_MK,
            torch.where(unknown_M1, at_ids_MK.detach(), teacher_MK),
            torch.where(unknown_M1, 0, ids_MK),
        )
        present_MK = (ids_MK != NO_ID) & ~unknown_M1
        measured = gap_to_teacher(logprobs_M, batch)
        for name, side_MK in (("top_k_mass", at_ids_MK.detach()), ("teacher_mass", teacher_MK)):
            mass = torch.where(present_MK, side_MK.exp(), 0.0).sum().item()
            measured[f"distill/{name}/mean"] = mean(mass, int((~unknown_M1).sum()))
        return logprobs_M, entropy_M, term_M, measured

    def _in_full(self, hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        assert self.teacher is not None and isinstance(self.mode, Divergent)
        teacher = self.teacher.head.frozen(self._states[batch])
        return self.head.divergence(
            hidden, batch, teacher, kind=self.mode.kind, beta=self.mode.beta
        )


def known_tokens(batch: PackedBatch) -> Array:
    """[M] whether the teacher answered; all of them where it lives in the rank."""
    known = np.ones(batch.num_loss_tokens, bool)
    if "teacher_logprobs" in batch.columns:
        known &= ~np.isnan(batch.columns["teacher_logprobs"])
    if "teacher_ids" in batch.columns:
        absent = batch.columns["teacher_ids"] == NO_ID
        known &= (absent | ~np.isnan(batch.columns["teacher_top_logprobs"])).all(axis=1)
        known &= ~absent.all(axis=1)
    return known


def check_ids(batch: PackedBatch, num_asked: int) -> None:
    """The teacher must have answered for the ids that the student chose, in their order."""
    if not num_asked:
        return
    asked, answered = batch.columns["student_ids"], batch.columns["teacher_ids"]
    wrong = (asked != answered[:, :num_asked]).any(axis=1)
    if wrong.any():
        names = sorted({batch.sample_ids[row] for row in batch.sequence_M[wrong]})
        raise TrainerError(
            f"the teacher answered for other token ids than the student's at {wrong.sum()} tokens "
            f"of {', '.join(names[:3])}; columns of two passes were mixed up"
        )


def gap_to_teacher(logprobs_M: torch.Tensor, batch: PackedBatch) -> dict[str, Metric]:
    """Of the sampled tokens: the teacher's log-prob, and the one-sample reverse KL l - tau."""
    teacher_M = step.to_device(batch.columns["teacher_logprobs"])
    known_M = ~teacher_M.isnan()
    tau_M = torch.where(known_M, teacher_M, 0.0)
    gap_M = torch.where(known_M, logprobs_M.detach() - tau_M, 0.0)
    tau, gap, count = torch.stack([tau_M.sum(), gap_M.sum(), known_M.sum()]).tolist()
    return {"distill/teacher_logprob/mean": mean(tau, count), "distill/kl": mean(gap, count)}
