"""What a teacher reads, and a teacher that lives in the actor's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlpost.distillation.base import NO_ID
from rlpost.errors import TrainerError
from rlpost.trainers.base import TrainResult
from rlpost.trainers.megatron.forward import Head, check_token_ids
from rlpost.trainers.megatron.network import Network
from rlpost.trainers.megatron.packing import PackedBatch, Row, pack
from rlpost.types import Array, BatchView

if TYPE_CHECKING:
    from rlpost.trainers.megatron.rank import MegatronRankConfig


def seen_by_teacher(row: Row, prompt_ids: Array) -> Row:
    """The row with another prompt before the same response.

    Prompt [5, 6], response [7, 8], teacher's prompt [9]: token_ids [9, 7, 8]. Other per-token
    columns move along with their tokens.
    """
    start = int(row["prompt_length"])
    fill = {"token_ids": prompt_ids, "loss_mask": np.zeros(len(prompt_ids), np.int64)}
    seen = {}
    for name, values in row.items():
        if np.ndim(values) == 0:
            continue
        absent = np.full((len(prompt_ids), *values.shape[1:]), NO_ID, values.dtype)
        seen[name] = np.concatenate([fill.get(name, absent), values[start:]])
    return seen


def packed_like(
    batch: PackedBatch, rows: Mapping[str, Row], *, columns: Sequence[str], multiple: int
) -> PackedBatch:
    """The same samples from other rows. Raises TrainerError unless the loss is on the same ids."""
    names = batch.sample_ids
    other = pack(names, [rows[name] for name in names], columns=columns, multiple=multiple)
    same = np.array_equal(other.lengths_S, batch.lengths_S)
    if not same or not np.array_equal(other.targets_M, batch.targets_M):
        wrong = [
            name
            for row, name in enumerate(names)
            if not np.array_equal(
                other.targets_M[other.sequence_M == row], batch.targets_M[batch.sequence_M == row]
            )
        ]
        raise TrainerError(
            f"teacher and student read different responses of {', '.join(wrong[:3])}; both must "
            "get the token ids that the engine sampled"
        )
    return other


class FrozenTeacher(Network):
    """A model beside the actor's, cut over the same ranks."""

    area = "teacher"

    def __init__(
        self, config: MegatronRankConfig, *, model_path: str, dtype: str, temperature: float
    ) -> None:
        super().__init__(config, model_path=model_path, dtype=dtype, head="logits", trained=False)
        self.head = Head(
            self.model, self.hf_config.vocab_size, temperature, config.logprobs_chunk_tokens
        )

    def batch_like(self, batch: PackedBatch, seen: Mapping[str, Row]) -> PackedBatch:
        shown = packed_like(batch, seen, columns=(), multiple=self.multiple)
        check_token_ids([shown], self.hf_config.vocab_size)
        return shown

    def states(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """[M, H] of each micro-batch; [] off the last stage."""
        return self._forward(batches, self.head.predicting)

    def train(self, view: BatchView) -> TrainResult:
        raise TrainerError("a teacher is not trained")
