"""The policy on one rank: log-probs and training. MegatronRank builds and calls it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rlpost.algorithms.base import Algorithm
from rlpost.engines.base import WeightChunk
from rlpost.errors import TrainerError
from rlpost.metrics import over_steps
from rlpost.trainers.base import TrainResult
from rlpost.trainers.megatron import export, rows, step
from rlpost.trainers.megatron.forward import Head
from rlpost.trainers.megatron.network import FORWARD_COLUMNS, Network
from rlpost.trainers.megatron.packing import PackedBatch
from rlpost.trainers.megatron.step_credit import STEP_INDEX, Earned, earned_steps, with_steps
from rlpost.types import BatchView, PassResult

if TYPE_CHECKING:
    from rlpost.trainers.megatron.rank import MegatronRankConfig


class Policy(Network):
    """Without `algorithm` it is forward-only: a reference."""

    area = "train"

    def __init__(
        self,
        config: MegatronRankConfig,
        *,
        model_path: str,
        dtype: str,
        algorithm: Algorithm | None,
        temperature: float,
    ) -> None:
        super().__init__(
            config,
            model_path=model_path,
            dtype=dtype,
            head="logits",
            trained=algorithm is not None,
        )
        self.algorithm = algorithm
        self.head = Head(
            self.model, self.hf_config.vocab_size, temperature, config.logprobs_chunk_tokens
        )

    def compute_logprobs(self, view: BatchView, column: str) -> PassResult:
        started = time.perf_counter()
        rows.check_view(view, data_size=self.layout.data_size)
        by_name = self._read(view, FORWARD_COLUMNS)
        batches = self._pack(list(by_name), by_name, columns=())
        logprobs = self._forward(
            batches, lambda hidden, batch: self.head(hidden, batch)[0].cpu().numpy()
        )
        block = self._stored(batches, logprobs, column)
        return PassResult(block=block, metrics={}, seconds=time.perf_counter() - started)

    def train(self, view: BatchView) -> TrainResult:
        """Raises TrainerError for an impossible batch, BudgetError after too many skipped steps."""
        started = time.perf_counter()
        algorithm = self._trained_by()
        rows.check_view(view, data_size=self.layout.data_size)
        earned = earned_steps(view.scalars)
        columns = ("rollout_logprobs", *algorithm.passes, *((STEP_INDEX,) if earned else ()))
        by_name = self._read(view, FORWARD_COLUMNS + columns)
        shares = self._shares(
            view,
            by_name,
            columns,
            algorithm=algorithm,
            make_targets=partial(self._advantages, earned),
        )
        skipped = self.counters.skipped_steps
        parts = [self._optimizer_step(shares[part], self._loss) for part in view.minibatches]
        pairs = [(b, t.targets_M.cpu().numpy()) for share in shares.values() for b, t in share]
        return TrainResult(
            metrics=over_steps(parts),
            skipped_steps=self.counters.skipped_steps - skipped,
            seconds=time.perf_counter() - started,
            block=self._stored([b for b, _ in pairs], [a for _, a in pairs], "advantages"),
        )

    def _advantages(
        self, earned: Earned, batches: Sequence[PackedBatch], outcome: Mapping[str, float]
    ) -> list[torch.Tensor]:
        made = step.advantages(self._trained_by(), batches, outcome=outcome, layout=self.layout)
        return with_steps(made, batches, earned) if earned else made

    def _loss(
        self, hidden: torch.Tensor, batch: PackedBatch, target: step.Targets | None
    ) -> tuple[torch.Tensor, Any]:
        algorithm = self._trained_by()
        return step.loss(hidden, batch, head=self.head, algorithm=algorithm, target=target)

    def _trained_by(self) -> Algorithm:
        if self.algorithm is None:
            raise TrainerError("this role has no algorithm and can't be trained; train the actor")
        return self.algorithm

    def export_weights(self, dtype: str) -> list[WeightChunk]:
        return export.weight_chunks(
            self.model, self.hf_config, dtype=getattr(torch, dtype), layout=self.layout
        )
