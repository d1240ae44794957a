"""One rank's model with what is done to it alike, whether it is a policy or a critic."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlpost.algorithms.base import Algorithm
from rlpost.errors import BudgetError
from rlpost.metrics import Metric, mean, merge
from rlpost.models.shape import Head
from rlpost.trainers.base import TrainResult
from rlpost.trainers.megatron import converter, device, export, hf_io, offload, rows, state, step
from rlpost.trainers.megatron import optimizer as optimizers
from rlpost.trainers.megatron.forward import check_token_ids, run_micro_batches
from rlpost.trainers.megatron.layout import Layout
from rlpost.trainers.megatron.model import build_model
from rlpost.trainers.megatron.options import learning_rate
from rlpost.trainers.megatron.packing import PackedBatch, Row, dummy
from rlpost.types import Array, BatchView, StoredBlock

if TYPE_CHECKING:
    from rlpost.trainers.megatron.role import MegatronRoleConfig

FORWARD_COLUMNS = ("token_ids", "loss_mask")

Minibatch = tuple[tuple[str, ...], ...]  # sample ids of each data-parallel rank
Share = list[tuple[PackedBatch, step.Targets]]  # this rank's part of an optimizer step
# (rank's micro-batches of the batch, sample id -> outcome) -> [M] for each micro-batch
TargetMaker = Callable[[Sequence[PackedBatch], Mapping[str, float]], list[torch.Tensor]]


class Network(ABC):
    """Model, optimizer (None unless `trained`) and counters of one rank.

    `area` is the first part of the names of its metrics.
    """

    area: str

    def __init__(
        self,
        config: MegatronRoleConfig,
        *,
        model_path: str,
        dtype: str,
        head: Head,
        trained: bool,
    ) -> None:
        self.config = config
        self.layout = Layout.read()
        self.model_path = model_path
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.counters = state.Counters(applied_steps=0, skipped_steps=0)
        self.hf_config = hf_io.read_config(model_path)
        self.model = build_model(
            self.hf_config,
            dtype=self.dtype,
            options=config.megatron,
            vocab_multiple=config.make_vocab_size_divisible_by,
            head=head,
        )
        self._load_weights(hf_io.HfReader(model_path))
        # Sequence parallelism cuts the tokens of a micro-batch evenly over the tensor ranks.
        parallel = self.model.config
        self.multiple = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        self.offloader = offload.Offloader()
        self.wrapped: Any = None
        self.optimizer: Any = None
        if trained:
            self.wrapped = optimizers.wrap(self.model)
            self.optimizer = optimizers.build(self.wrapped, config.optimizer, self.dtype)
        else:
            self.model.requires_grad_(False)

    @abstractmethod
    def train(self, view: BatchView) -> TrainResult:
        """One optimizer step per minibatch of the view."""

    def _load_weights(self, reader: hf_io.HfReader) -> None:
        converter.load_hf(self.model, self.hf_config, reader.get_tensor)

    def _stored(
        self, batches: Sequence[PackedBatch], values: Sequence[Array], column: str
    ) -> StoredBlock | None:
        """The new column of this data-parallel share, from the one rank that owns its results."""
        return rows.store_column(batches, values, column) if self.layout.owns_results else None

    @torch.no_grad()
    def _forward(
        self, batches: Sequence[PackedBatch], consume: Callable[[torch.Tensor, PackedBatch], Any]
    ) -> list[Any]:
        """What `consume` makes of the output of each micro-batch; [] off the last stage."""
        if not batches:
            return []
        self.model.eval()
        collected = run_micro_batches(self.model, batches, consume, train=False)
        self.model.train()
        return collected

    def _shares(
        self,
        view: BatchView,
        by_name: dict[str, Row],
        columns: Sequence[str],
        *,
        algorithm: Algorithm,
        make_targets: TargetMaker,
    ) -> dict[Minibatch, Share]:
        """This rank's part of each different minibatch; a batch may be visited several times.

        Targets are made from the whole batch, weights from one minibatch.
        """
        outcome = step.outcomes(algorithm, view.scalars)
        loss_tokens = rows.loss_tokens_of(view, outcome)
        packed = {}
        for minibatch in dict.fromkeys(view.minibatches):
            mine = [name for name in minibatch[self.layout.data_rank] if name in loss_tokens]
            packed[minibatch] = self._pack(mine, by_name, columns=columns)
            rows.check_loss_tokens(packed[minibatch], loss_tokens)
        whole = [batch for batches in packed.values() for batch in batches]
        made = iter(make_targets(whole, outcome))
        shares = {}
        for minibatch, batches in packed.items():
            weights = step.weights(algorithm, batches, step.totals(minibatch, loss_tokens))
            targets = [step.Targets(next(made), weights_M) for weights_M in weights]
            shares[minibatch] = list(zip(batches, targets, strict=True))
        return shares

    def _optimizer_step(
        self,
        share: Share,
        loss: Callable[[torch.Tensor, PackedBatch, step.Targets | None], tuple[torch.Tensor, Any]],
    ) -> Mapping[str, Metric]:
        """`loss` gets no targets for the dummy of a rank that has nothing in this step."""
        targets = dict(share)
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        work = [batch for batch, _ in share] or [dummy(multiple=self.multiple)]
        parts = run_micro_batches(
            self.wrapped,
            work,
            lambda output, batch: loss(output, batch, targets.get(batch)),
            train=True,
        )
        measured = self._apply_gradients()
        return merge([*parts, measured]) if self.layout.owns_results else {}

    def _apply_gradients(self) -> Mapping[str, Metric]:
        options = self.config.optimizer
        lr = learning_rate(self.config.lr_schedule, options.lr, self.counters.applied_steps)
        done = optimizers.apply_gradients(self.optimizer, lr=lr, clip_grad=options.clip_grad)
        self._count(applied=done.applied, grad_norm=done.grad_norm)
        if not self.layout.reports_run:
            return {}
        finite = done.grad_norm if math.isfinite(done.grad_norm) else 0.0
        return {
            f"{self.area}/grad_norm": mean(finite, int(done.applied)),
            f"{self.area}/lr": mean(lr, 1),
        }

    def _count(self, *, applied: bool, grad_norm: float) -> None:
        self.counters = state.Counters(
            applied_steps=self.counters.applied_steps + applied,
            skipped_steps=self.counters.skipped_steps + (not applied),
        )
        if self.counters.skipped_steps > self.config.max_skipped_steps:
            raise BudgetError(
                f"{self.counters.skipped_steps} optimizer steps were skipped for a gradient norm "
                f"that is not finite (the last: {grad_norm}), more than max_skipped_steps "
                f"({self.config.max_skipped_steps}); lower optimizer.lr, or raise the budget"
            )

    def _read(self, view: BatchView, columns: Sequence[str]) -> dict[str, Row]:
        return rows.read_rows(
            view,
            data_rank=self.layout.data_rank,
            columns=columns,
            deadline_s=self.config.step_deadline_s,
        )

    def _pack(
        self, names: Sequence[str], by_name: dict[str, Row], *, columns: Sequence[str]
    ) -> list[PackedBatch]:
        batches = rows.micro_batches(
            names,
            by_name,
            columns=columns,
            budget=self.config.micro_batch_tokens,
            multiple=self.multiple,
        )
        check_token_ids(batches, self.hf_config.vocab_size)
        return batches

    def save_hf(self, path: str) -> None:
        export.write_hf(
            path,
            self.model,
            self.hf_config,
            dtype=self.dtype,
            source=self.model_path,
            layout=self.layout,
        )

    def save(self, path: str) -> None:
        state.save(Path(path), model=self.model, optimizer=self.optimizer, counters=self.counters)

    def load(self, path: str) -> None:
        self.counters = state.load(Path(path), model=self.model, optimizer=self.optimizer)

    def offload(self) -> None:
        if not device.has_cuda():
            return
        kept = offload.model_tensors(self.model)
        scratch: list[torch.Tensor] = []
        if self.optimizer is not None:
            kept += offload.optimizer_tensors(self.optimizer)
            scratch = offload.gradient_tensors(self.wrapped)
        self.offloader.offload(kept, scratch)
        device.empty_cache()

    def onload(self) -> None:
        self.offloader.onload()

    def held_bytes(self) -> dict[str, int]:
        """Of the tensors that stay between calls."""
        return offload.held_bytes(self.model, self.wrapped, self.optimizer)

    def parameters_hash(self) -> str:
        return state.parameters_hash(self.model)
