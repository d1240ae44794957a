"""The critic on one rank: values of states, regressed on returns. MegatronCriticRank calls it.

The value at token t is V of the state before it, tokens 0 to t - 1: like the log-prob of token t it
comes from the model's output at position t - 1, so all of a token's columns share one index.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlpost import functional as F
from rlpost.algorithms.base import ValueAlgorithm, ValueLossInputs
from rlpost.metrics import Metric, mean, merge
from rlpost.trainers.base import TrainResult
from rlpost.trainers.megatron import converter, hf_io, rows, step
from rlpost.trainers.megatron.network import FORWARD_COLUMNS, Network
from rlpost.trainers.megatron.packing import PackedBatch
from rlpost.trainers.megatron.weight_names import VALUE_HEAD
from rlpost.types import BatchView, PassResult

if TYPE_CHECKING:
    from rlpost.trainers.megatron.role import MegatronRoleConfig


class Critic(Network):
    """A model of its own with a value head, which starts at zero unless the folder has one."""

    area = "critic"

    def __init__(
        self, config: MegatronRoleConfig, *, model_path: str, dtype: str, algorithm: ValueAlgorithm
    ) -> None:
        super().__init__(config, model_path=model_path, dtype=dtype, head="value", trained=True)
        self.algorithm = algorithm

    def _load_weights(self, reader: hf_io.HfReader) -> None:
        get_tensor = hf_io.with_fresh_head(reader, VALUE_HEAD, 1, self.hf_config.hidden_size)
        converter.load_hf(self.model, self.hf_config, get_tensor)

    def compute_values(self, view: BatchView, column: str) -> PassResult:
        started = time.perf_counter()
        rows.check_view(view, data_size=self.layout.data_size)
        by_name = self._read(view, FORWARD_COLUMNS)
        batches = self._pack(list(by_name), by_name, columns=())
        values = self._forward(batches, lambda output, batch: picked(output, batch).cpu().numpy())
        block = self._stored(batches, values, column)
        return PassResult(block=block, metrics={}, seconds=time.perf_counter() - started)

    def train(self, view: BatchView) -> TrainResult:
        """Raises TrainerError for an impossible batch, BudgetError after too many skipped steps."""
        started = time.perf_counter()
        rows.check_view(view, data_size=self.layout.data_size)
        columns = self.algorithm.critic_passes
        by_name = self._read(view, FORWARD_COLUMNS + columns)
        shares = self._shares(
            view, by_name, columns, algorithm=self.algorithm, make_targets=self._returns
        )
        skipped = self.counters.skipped_steps
        parts = [self._optimizer_step(shares[part], self._loss) for part in view.minibatches]
        pairs = [(b, t.targets_M) for share in shares.values() for b, t in share]
        explained = self._explained_variance(pairs)
        return TrainResult(
            metrics=merge([*parts, explained]),
            skipped_steps=self.counters.skipped_steps - skipped,
            seconds=time.perf_counter() - started,
            block=self._stored(
                [b for b, _ in pairs], [r.cpu().numpy() for _, r in pairs], "returns"
            ),
        )

    def _returns(
        self, batches: Sequence[PackedBatch], outcome: Mapping[str, float]
    ) -> list[torch.Tensor]:
        inputs = step.token_inputs(
            self.algorithm.critic_passes, batches, outcome=outcome, layout=self.layout
        )
        return step.cut(self.algorithm.returns(inputs), batches)

    def _loss(
        self, output: torch.Tensor, batch: PackedBatch, target: step.Targets | None
    ) -> tuple[torch.Tensor, Any]:
        if target is None or batch.num_loss_tokens == 0:
            return output.sum() * 0.0, {}
        return self.algorithm.value_loss(
            ValueLossInputs(
                values_M=picked(output, batch),
                old_values_M=step.to_device(batch.columns["values"]),
                returns_M=target.targets_M,
                weights_M=target.weights_M,
            )
        )

    def _explained_variance(
        self, pairs: Sequence[tuple[PackedBatch, torch.Tensor]]
    ) -> Mapping[str, Metric]:
        """Of the values before the update. All ranks call it; one reports."""
        empty = torch.zeros(0)
        values_M = torch.cat([empty, *(torch.from_numpy(b.columns["values"]) for b, _ in pairs)])
        returns_M = torch.cat([empty, *(returns.cpu() for _, returns in pairs)])
        values_M, returns_M = step.to_device(values_M.numpy()), step.to_device(returns_M.numpy())
        keep_M = torch.ones_like(values_M, dtype=torch.bool)
        found = F.explained_variance(values_M, returns_M, keep_M, self.layout.sum_over_data)
        return {"critic/explained_variance": mean(found, 1)} if self.layout.reports_run else {}


def picked(output: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Model output [1, T, 1] -> values [M] at the positions that predict the loss tokens."""
    return output[0, :, 0].index_select(0, step.to_device(batch.hidden_rows_M))
