"""One rank's model with everything that is done to it. MegatronRank builds and calls it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlpost.algorithms.base import Algorithm
from rlpost.engines.base import WeightChunk
from rlpost.errors import BudgetError, TrainerError
from rlpost.metrics import Metric, mean, merge
from rlpost.trainers.base import TrainResult
from rlpost.trainers.megatron import converter, device, export, hf_io, offload, rows, state, step
from rlpost.trainers.megatron import optimizer as optimizers
from rlpost.trainers.megatron.forward import Head, check_token_ids, run_micro_batches
from rlpost.trainers.megatron.layout import Layout
from rlpost.trainers.megatron.model import build_model
from rlpost.trainers.megatron.options import learning_rate
from rlpost.trainers.megatron.packing import PackedBatch, Row, dummy
from rlpost.types import Array, BatchView, PassResult, StoredBlock

if TYPE_CHECKING:
    from rlpost.trainers.megatron.rank import MegatronRankConfig

FORWARD_COLUMNS = ("token_ids", "loss_mask")

Minibatch = tuple[tuple[str, ...], ...]  # sample ids of each data-parallel rank
Share = list[tuple[PackedBatch, step.Targets]]  # this rank's part of an optimizer step


class Policy:
    """Model, optimizer (None for a forward-only role) and counters of one rank."""

    def __init__(
        self,
        config: MegatronRankConfig,
        *,
        model_path: str,
        dtype: str,
        algorithm: Algorithm | None,
        temperature: float,
    ) -> None:
        self.config = config
        self.layout = Layout.read()
        self.algorithm = algorithm
        self.model_path = model_path
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.counters = state.Counters(applied_steps=0, skipped_steps=0)
        self.hf_config = hf_io.read_config(model_path)
        self.model = build_model(
            self.hf_config,
            dtype=self.dtype,
            options=config.megatron,
            vocab_multiple=config.make_vocab_size_divisible_by,
        )
        reader = hf_io.HfReader(model_path)
        converter.load_hf(self.model, self.hf_config, reader.get_tensor)
        self.head = Head(
            self.model, self.hf_config.vocab_size, temperature, config.logprobs_chunk_tokens
        )
        # Sequence parallelism cuts the tokens of a micro-batch evenly over the tensor ranks.
        parallel = self.model.config
        self.multiple = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        self.offloader = offload.Offloader()
        self.wrapped: Any = None
        self.optimizer: Any = None
        if algorithm is None:
            self.model.requires_grad_(False)
        else:
            self.wrapped = optimizers.wrap(self.model)
            self.optimizer = optimizers.build(self.wrapped, config.optimizer, self.dtype)

    def compute_logprobs(self, view: BatchView, column: str) -> PassResult:
        started = time.perf_counter()
        rows.check_view(view, data_size=self.layout.data_size)
        by_name = self._read(view, FORWARD_COLUMNS)
        batches = self._pack(list(by_name), by_name, columns=())
        logprobs = self._forward(batches) if batches else []
        block = self._stored(batches, logprobs, column)
        return PassResult(block=block, metrics={}, seconds=time.perf_counter() - started)

    def _stored(
        self, batches: Sequence[PackedBatch], values: Sequence[Array], column: str
    ) -> StoredBlock | None:
        """The new column of this data-parallel share, from the one rank that owns its results."""
        return rows.store_column(batches, values, column) if self.layout.owns_results else None

    @torch.no_grad()
    def _forward(self, batches: Sequence[PackedBatch]) -> list[Array]:
        def logprobs(hidden: torch.Tensor, batch: PackedBatch) -> Any:
            return self.head(hidden, batch)[0].cpu().numpy()

        self.model.eval()
        collected = run_micro_batches(self.model, batches, logprobs, train=False)
        self.model.train()
        return collected

    def train(self, view: BatchView) -> TrainResult:
        """Raises TrainerError for an impossible batch, BudgetError after too many skipped steps."""
        started = time.perf_counter()
        algorithm = self._trained_by()
        rows.check_view(view, data_size=self.layout.data_size)
        columns = ("rollout_logprobs", *algorithm.passes)
        by_name = self._read(view, FORWARD_COLUMNS + columns)
        shares = self._shares(view, by_name, columns)
        skipped = self.counters.skipped_steps
        parts = [self._optimizer_step(shares[minibatch]) for minibatch in view.minibatches]
        pairs = [(b, t.advantages_M.cpu().numpy()) for share in shares.values() for b, t in share]
        return TrainResult(
            metrics=merge(parts),
            skipped_steps=self.counters.skipped_steps - skipped,
            seconds=time.perf_counter() - started,
            block=self._stored([b for b, _ in pairs], [a for _, a in pairs], "advantages"),
        )

    def _shares(
        self, view: BatchView, by_name: dict[str, Row], columns: Sequence[str]
    ) -> dict[Minibatch, Share]:
        """This rank's part of each different minibatch; a batch may be visited several times.

        Advantages are made from the whole batch, weights from one minibatch.
        """
        algorithm = self._trained_by()
        outcome = step.outcomes(algorithm, view.scalars)
        loss_tokens = rows.loss_tokens_of(view, outcome)
        packed = {}
        for minibatch in dict.fromkeys(view.minibatches):
            mine = [name for name in minibatch[self.layout.data_rank] if name in loss_tokens]
            packed[minibatch] = self._pack(mine, by_name, columns=columns)
            rows.check_loss_tokens(packed[minibatch], loss_tokens)
        whole = [batch for batches in packed.values() for batch in batches]
        advantages = iter(step.advantages(algorithm, whole, outcome=outcome, layout=self.layout))
        shares = {}
        for minibatch, batches in packed.items():
            weights = step.weights(algorithm, batches, step.totals(minibatch, loss_tokens))
            targets = [step.Targets(next(advantages), weights_M) for weights_M in weights]
            shares[minibatch] = list(zip(batches, targets, strict=True))
        return shares

    def _trained_by(self) -> Algorithm:
        if self.algorithm is None:
            raise TrainerError("this role has no algorithm and can't be trained; train the actor")
        return self.algorithm

    def _optimizer_step(self, share: Share) -> Mapping[str, Metric]:
        algorithm = self._trained_by()
        of_batch = {id(batch): target for batch, target in share}

        def loss(hidden: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, Any]:
            target = of_batch.get(id(batch))
            return step.loss(hidden, batch, head=self.head, algorithm=algorithm, target=target)

        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        work = [batch for batch, _ in share] or [dummy(multiple=self.multiple)]
        parts = run_micro_batches(self.wrapped, work, loss, train=True)
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
        return {"train/grad_norm": mean(finite, int(done.applied)), "train/lr": mean(lr, 1)}

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

    def export_weights(self, dtype: str) -> list[WeightChunk]:
        return export.weight_chunks(
            self.model, self.hf_config, dtype=getattr(torch, dtype), layout=self.layout
        )

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

    def parameters_hash(self) -> str:
        return state.parameters_hash(self.model)
