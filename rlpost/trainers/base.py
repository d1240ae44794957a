"""The contract of one trainer rank. All ranks of a role are called together (SPMD).

Every implementation passes tests/contract/test_trainer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlpost.cluster.rendezvous import Rendezvous
from rlpost.engines.base import Stage, WeightChunk
from rlpost.metrics import Metric
from rlpost.models.base import Dtype
from rlpost.models.shape import ModelShape
from rlpost.types import BatchView, PassResult, StoredBlock


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Who a rank is. `world_size` = tensor x pipeline x data parallel."""

    role: str  # actor, reference, ...
    rank: int
    world_size: int
    rendezvous: Rendezvous


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a rank will hold and work on, as far as its memory depends on it.

    `longest_tokens` of one sample, `num_samples` of one optimizer step on the rank; `teacher` is a
    second model in the rank; `exports`: its weights go to engines.
    """

    shape: ModelShape
    dtype: Dtype
    rank: int
    trained: bool
    longest_tokens: int
    num_samples: int
    teacher: ModelShape | None
    exports: bool


@dataclass(frozen=True)
class TrainResult:
    """One rank's share of a batch's optimizer steps; driver merges `metrics` over ranks.

    `skipped_steps`: optimizer steps skipped for a non-finite gradient (equal on all ranks).
    `block`: per-token column "advantages" of the rank's rows (a critic's: "returns"), for the
    record.
    """

    metrics: Mapping[str, Metric]
    skipped_steps: int
    seconds: float
    block: StoredBlock | None


class RoleRank(Protocol):
    """One rank of any role."""

    def setup(self) -> dict[str, float]:
        """Joins the process group, builds and loads the model. Returns phase -> seconds."""

    def train(self, view: BatchView) -> TrainResult:
        """One optimizer step per minibatch of the view. Raises TrainerError."""

    def save_hf(self, path: str) -> None:
        """Writes a complete Hugging Face folder (all ranks call; one writes)."""

    def save(self, path: str) -> None:
        """Writes weights, optimizer, schedule and RNG under `path` (all ranks call)."""

    def load(self, path: str) -> None:
        """Restores what save() wrote. Raises CheckpointError."""

    def offload(self) -> None:
        """Moves model and optimizer state out of the device's memory (no-op where CPU is it)."""

    def onload(self) -> None: ...

    def parameters_hash(self) -> str:
        """sha256 over this rank's parameters: equal hashes mean bit-equal parameters."""

    def memory(self) -> dict[str, float]:
        """What the rank takes, bytes.

        `weights_bytes`, `gradients_bytes`, `optimizer_bytes` of the tensors it holds; those of
        rlpost.memory.process_memory and, on a GPU, `device_bytes` and `device_peak_bytes`.
        """


class TrainerRank(RoleRank, Protocol):
    """One rank of the policy, or of a frozen model with log-probs."""

    def compute_logprobs(self, view: BatchView, column: str) -> PassResult:
        """Log-probs of every loss token of the rank's rows, as per-token column `column`.

        NaN where loss_mask is 0. At the sampling temperature given in the trainer's config. An
        actor that distils adds `student_ids` where its mode asks for them.
        """

    def compute_teacher(self, view: BatchView, column: str) -> PassResult:
        """A teacher's columns (see distillation/base.py) of the rank's rows, at the student's
        token positions. Raises TrainerError when it reads another response than the student's."""

    def export_weights(self, dtype: str, stage: Stage) -> list[WeightChunk]:
        """Hugging Face tensors owned by this rank (empty unless it is the exporting rank).

        `stage` puts the tensors of one chunk where the engines find them.
        """


class CriticRank(RoleRank, Protocol):
    """One rank of a critic. `save_hf` writes backbone and value head."""

    def compute_values(self, view: BatchView, column: str) -> PassResult:
        """V of the state before each loss token of the rank's rows, as per-token column `column`.

        Aligned like log-probs: entry t is the value of tokens 0 to t - 1. NaN off the loss tokens.
        """


def split_rows(view: BatchView, data_parallel_rank: int) -> Sequence[tuple[str, ...]]:
    """This rank's sample ids, one tuple per minibatch."""
    return [shares[data_parallel_rank] for shares in view.minibatches]
