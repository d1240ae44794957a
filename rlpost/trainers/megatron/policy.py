"""One rank's model with everything that is done to it. MegatronRank builds and calls it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlpost.algorithms.base import Algorithm
from rlpost.engines.base import WeightChunk
from rlpost.errors import BudgetError, TrainerError
from rlpost.metrics import Metric, mean, merge
from rlpost.trainers.base import TrainResult, split_rows
from rlpost.trainers.megatron import converter, device, export, hf_io, offload, rows, state, step
from rlpost.trainers.megatron import optimizer as optimizers
from rlpost.trainers.megatron.forward import Head, check_token_ids, run_micro_batches
from rlpost.trainers.megatron.layout import Layout
from rlpost.trainers.megatron.model import build_model
from rlpost.trainers.megatron.options import learning_rate
from rlpost.trainers.megatron.packing import PackedBatch, Row, dummy, unpack
from rlpost.types import Array, BatchView, PassResult, SampleBlock

if TYPE_CHECKING:
    from rlpost.trainers.megatron.rank import MegatronRankConfig

FORWARD_COLUMNS = ("token_ids", "loss_mask")


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
        block = None
        if batches:
            block = self._block(batches, self._forward(batches), column)
        return PassResult(block=block, metrics={}, seconds=time.perf_counter() - started)

    @torch.no_grad()
    def _forward(self, batches: Sequence[PackedBatch]) -> list[Array]:
        def logprobs(hidden: torch.Tensor, batch: PackedBatch) -> Any:
            return self.head(hidden, batch)[0].cpu().numpy()

        self.model.eval()
        collected = run_micro_batches(self.model, batches, logprobs, train=False)
        self.model.train()
        return collected

    def _block(
        self, batches: Sequence[PackedBatch], logprobs: Sequence[Any], column: str
    ) -> Any | None:
        """Reference to the new column on the rank that owns the share's results, else None."""
        from rlpost.cluster import store

        if not self.layout.owns_results:
            return None
        parts = [unpack(batch, values) for batch, values in zip(batches, logprobs, strict=True)]
        return store.put(
            SampleBlock(
                sample_ids=tuple(name for batch in batches for name in batch.sample_ids),
                lengths=np.concatenate([lengths for _, lengths in parts]),
                tokens={column: np.concatenate([values for values, _ in parts])},
            )
        )

    def train(self, view: BatchView) -> TrainResult:
        """Raises TrainerError for an impossible batch, BudgetError after too many skipped steps."""
        started = time.perf_counter()
        algorithm = self._trained_by()
        rows.check_view(view, data_size=self.layout.data_size)
        columns = ("rollout_logprobs", *algorithm.passes)
        by_name = self._read(view, FORWARD_COLUMNS + columns)
        outcome = step.outcomes(algorithm, view.scalars)
        loss_tokens = dict(zip(view.scalars.sample_ids, view.scalars.loss_tokens, strict=True))
        skipped = self.counters.skipped_steps
        parts = []
        for index, share in enumerate(split_rows(view, self.layout.data_rank)):
            batches = self._pack(share, by_name, columns=columns)
            rows.check_loss_tokens(batches, loss_tokens)
            names = [name for names in view.minibatches[index] for name in names]
            totals = step.Totals(sum(loss_tokens[name] for name in names), len(names))
            parts.append(self._optimizer_step(batches, outcome=outcome, totals=totals))
        return TrainResult(
            metrics=merge(parts),
            skipped_steps=self.counters.skipped_steps - skipped,
            seconds=time.perf_counter() - started,
        )

    def _trained_by(self) -> Algorithm:
        if self.algorithm is None:
            raise TrainerError("this role has no algorithm and can't be trained; train the actor")
        return self.algorithm

    def _optimizer_step(
        self, batches: list[PackedBatch], *, outcome: Mapping[str, float], totals: step.Totals
    ) -> Mapping[str, Metric]:
        algorithm = self._trained_by()
        targets = step.targets(
            algorithm, batches, outcome=outcome, totals=totals, layout=self.layout
        )
        of_batch = {id(batch): target for batch, target in zip(batches, targets, strict=True)}

        def loss(hidden: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, Any]:
            target = of_batch.get(id(batch))
            return step.loss(hidden, batch, head=self.head, algorithm=algorithm, target=target)

        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        work = batches or [dummy(multiple=self.multiple)]
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
