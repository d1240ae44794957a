"""The classifier of steps on one rank. MegatronClassifierRank calls it.

The label of a step is read at its last token, from the output at that very position: by then the
model has seen the whole step. Letters as in packing.py; M are the last tokens of scored steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlpost.algorithms.step_classification import StepClassification
from rlpost.errors import ModelError, TrainerError
from rlpost.metrics import Metric, mean, merge, over_steps
from rlpost.prm.calibration import bin_sums, calibration_error
from rlpost.trainers.base import TrainResult
from rlpost.trainers.megatron import converter, hf_io, rows, step
from rlpost.trainers.megatron.network import (
    FORWARD_COLUMNS,
    Minibatch,
    Network,
    Share,
)
from rlpost.trainers.megatron.packing import PackedBatch, Row
from rlpost.trainers.megatron.step_credit import STEP_INDEX
from rlpost.trainers.megatron.weight_names import LABELS_HEAD
from rlpost.types import Array, BatchScalars, BatchView

if TYPE_CHECKING:
    from rlpost.trainers.megatron.role import MegatronRoleConfig

NUM_LABELS = 2
SCORE = "step_score"
ARCHITECTURES = {
    "llama": "LlamaForTokenClassification",
    "qwen2": "Qwen2ForTokenClassification",
    "qwen3": "Qwen3ForTokenClassification",
    "qwen3_moe": "Qwen3MoeForTokenClassification",
}
Scores = Mapping[str, Sequence[float]]  # sample id -> score of each step, NaN where missing


class Classifier(Network):
    """A model of its own with a head for two labels."""

    area = "train"

    def __init__(
        self,
        config: MegatronRoleConfig,
        *,
        model_path: str,
        dtype: str,
        algorithm: StepClassification,
    ) -> None:
        super().__init__(config, model_path=model_path, dtype=dtype, head="labels", trained=True)
        self.algorithm = algorithm
        self.hf_config.architectures = [ARCHITECTURES[self.hf_config.model_type]]

    def _load_weights(self, reader: hf_io.HfReader) -> None:
        if self.hf_config.num_labels != NUM_LABELS:
            raise ModelError(
                f"{self.model_path} is a classifier of {self.hf_config.num_labels} labels; steps "
                f"have {NUM_LABELS}; start from a causal model or from such a classifier"
            )
        get_tensor = hf_io.with_fresh_head(
            reader, LABELS_HEAD, NUM_LABELS, self.hf_config.hidden_size
        )
        converter.load_hf(self.model, self.hf_config, get_tensor)

    def train(self, view: BatchView) -> TrainResult:
        """Raises TrainerError for an impossible batch, BudgetError after too many skipped steps."""
        started = time.perf_counter()
        rows.check_view(view, data_size=self.layout.data_size)
        scores = known_scores(view.scalars)
        by_name = self._read(view, (*FORWARD_COLUMNS, STEP_INDEX))
        labelled = {name: label(name, row, scores[name]) for name, row in by_name.items()}
        shares = {part: self._share(part, labelled, scores) for part in view.minibatches}
        batches = [batch for share in shares.values() for batch, _ in share]
        predicted = self._forward(batches, lambda output, batch: said(output, batch))
        skipped = self.counters.skipped_steps
        parts = [self._optimizer_step(shares[part], self._loss) for part in view.minibatches]
        return TrainResult(
            metrics=merge([over_steps(parts), self._calibration(batches, predicted)]),
            skipped_steps=self.counters.skipped_steps - skipped,
            seconds=time.perf_counter() - started,
            block=self._stored(batches, predicted, "step_probability"),
        )

    def _share(self, minibatch: Minibatch, labelled: Mapping[str, Row], scores: Scores) -> Share:
        """This rank's rows of an optimizer step; each scored step weighs one over their number."""
        names = [name for share in minibatch for name in share]
        total = sum(not math.isnan(score) for name in names for score in scores[name])
        if total == 0:
            raise TrainerError(
                f"a minibatch of {len(names)} samples ({', '.join(names[:3])}, ...) has no scored "
                "step; look at prm/missing, or take larger minibatches"
            )
        mine = minibatch[self.layout.data_rank]
        batches = self._pack(mine, dict(labelled), columns=(SCORE,))
        return [(batch, self._targets(batch, total)) for batch in batches]

    def _targets(self, batch: PackedBatch, total: int) -> step.Targets:
        scores_M = step.to_device(batch.columns[SCORE])
        return step.Targets(scores_M, torch.full_like(scores_M, 1 / total))

    def _loss(
        self, output: torch.Tensor, batch: PackedBatch, target: step.Targets | None
    ) -> tuple[torch.Tensor, Any]:
        if target is None or batch.num_loss_tokens == 0:
            return output.sum() * 0.0, {}
        return self.algorithm.loss(at_ends(output, batch), target.targets_M, target.weights_M)

    def _calibration(
        self, batches: Sequence[PackedBatch], predicted: Sequence[Array]
    ) -> Mapping[str, Metric]:
        """Of the whole batch before the update. All ranks call it; one reports."""
        none: list[Array] = [np.zeros(0, np.float32)]
        # Off the last stage nothing was predicted.
        scores = [batch.columns[SCORE] for batch, _ in zip(batches, predicted, strict=False)]
        sums = bin_sums(np.concatenate(none + list(predicted)), np.concatenate(none + scores))
        whole = self.layout.sum_over_data(step.to_device(sums)).cpu().numpy()
        if not self.layout.reports_run:
            return {}
        return {"train/calibration_error": mean(calibration_error(whole), 1)}


def known_scores(scalars: BatchScalars) -> Scores:
    """Raises TrainerError without process rewards, or for a score that is no probability."""
    if not scalars.step_rewards:
        raise TrainerError("the batch has no scores of steps to learn from; choose prm=verifier")
    scores = dict(zip(scalars.sample_ids, scalars.step_rewards, strict=True))
    for name, steps in scores.items():
        outside = [score for score in steps if score < 0 or score > 1]
        if outside:
            raise TrainerError(
                f"sample {name!r} has a step score of {outside[0]:g}; labels lie between 0 and 1"
            )
    return scores


def label(name: str, row: Row, scores: Sequence[float]) -> Row:
    """The row with loss_mask on the last tokens of its scored steps, and step_score [L] there."""
    step_L = row[STEP_INDEX]
    ends_L = (step_L >= 0) & (step_L != np.append(step_L[1:], -1))
    if int(ends_L.sum()) != len(scores):
        raise TrainerError(
            f"sample {name!r} has {int(ends_L.sum())} steps, but scores of {len(scores)}; both "
            "must come from the same rollout"
        )
    score_L = np.full(len(step_L), np.nan, np.float32)
    score_L[ends_L] = scores
    return {"token_ids": row["token_ids"], "loss_mask": ~np.isnan(score_L), SCORE: score_L}


def at_ends(output: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Model output [1, T, 2] -> [M, 2] at the last tokens of the scored steps."""
    return output[0].index_select(0, step.to_device(batch.loss_rows_M))


def said(output: torch.Tensor, batch: PackedBatch) -> Array:
    """[M] probability of label 1."""
    shares: Array = torch.softmax(at_ends(output, batch).float(), dim=1)[:, 1].cpu().numpy()
    return shares
