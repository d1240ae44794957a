"""Adds what a step earned to the advantages of its tokens. Letters as in packing.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlpost.errors import TrainerError
from rlpost.trainers.megatron.packing import PackedBatch
from rlpost.types import Array, BatchScalars

STEP_INDEX = "step_index"
Earned = Mapping[str, Sequence[float]]  # sample id -> advantage of each step, NaN where missing


def earned_steps(scalars: BatchScalars) -> Earned:
    """{} in a run without process rewards."""
    if not scalars.step_advantages:
        return {}
    return dict(zip(scalars.sample_ids, scalars.step_advantages, strict=True))


def with_steps(
    advantages: Sequence[torch.Tensor], batches: Sequence[PackedBatch], earned: Earned
) -> list[torch.Tensor]:
    """A_it = A^outcome_i + coef * A^process_it for each micro-batch; a step without a score adds
    nothing. Raises TrainerError for a token whose step has no entry."""
    return [
        values_M + torch.from_numpy(step_term(batch, earned)).to(values_M)
        for values_M, batch in zip(advantages, batches, strict=True)
    ]


def step_term(batch: PackedBatch, earned: Earned) -> Array:
    """[M] coef * A^process of each loss token."""
    step_M = batch.columns[STEP_INDEX].astype(np.int64)
    counts = np.array([len(earned[name]) for name in batch.sample_ids], np.int64)
    outside_M = (step_M < 0) | (step_M >= counts[batch.sequence_M])
    if outside_M.any():
        name = batch.sample_ids[int(batch.sequence_M[outside_M][0])]
        raise TrainerError(
            f"sample {name!r} has a trained token in step {int(step_M[outside_M][0])}, but scores "
            f"of {len(earned[name])} steps; both must come from the same rollout"
        )
    values = np.array([value for name in batch.sample_ids for value in earned[name]], np.float64)
    starts = np.cumsum(counts) - counts
    term_M: Array = np.nan_to_num(values[starts[batch.sequence_M] + step_M], nan=0.0)
    return term_M
