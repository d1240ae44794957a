"""The policy on one rank: log-probs and training. MegatronRank builds and calls it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rlpost.algorithms.base import Algorithm
from rlpost.distillation.base import Distillation
from rlpost.engines.base import Stage, WeightChunk
from rlpost.errors import TrainerError
from rlpost.metrics import Metric, over_steps
from rlpost.trainers.base import TrainResult
from rlpost.trainers.megatron import export, rows, step
from rlpost.trainers.megatron.distill import Distiller, student_columns, teacher_columns
from rlpost.trainers.megatron.forward import Head
from rlpost.trainers.megatron.network import FORWARD_COLUMNS, Network, Share
from rlpost.trainers.megatron.packing import PackedBatch, Row
from rlpost.trainers.megatron.step_credit import STEP_INDEX, Earned, earned_steps, with_steps
from rlpost.trainers.megatron.teacher import FrozenTeacher, packed_like, seen_by_teacher
from rlpost.types import Array, BatchView, PassResult, StoredBlock

if TYPE_CHECKING:
    from rlpost.trainers.megatron.rank import MegatronRankConfig


class Policy(Network):
    """Without `algorithm` it is forward-only: a reference."""

    area = "train"
    config: MegatronRankConfig

    def __init__(
        self,
        config: MegatronRankConfig,
        *,
        model_path: str,
        dtype: str,
        algorithm: Algorithm | None,
        temperature: float,
        distillation: Distillation | None,
        teacher_path: str | None,
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
        self.distillation = distillation
        self.distiller: Distiller | None = None
        if distillation is not None and algorithm is not None:
            self.distiller = Distiller(
                distillation,
                head=self.head,
                layout=self.layout,
                teacher=self._frozen_teacher(distillation, teacher_path, dtype),
            )

    def _frozen_teacher(
        self, distillation: Distillation, path: str | None, dtype: str
    ) -> FrozenTeacher | None:
        if not distillation.in_actor:
            return None
        assert path is not None, "a mode with the teacher in the actor gets its folder"
        temperature = distillation.config.teacher_temperature
        return FrozenTeacher(self.config, model_path=path, dtype=dtype, temperature=temperature)

    def compute_logprobs(self, view: BatchView, column: str) -> PassResult:
        started = time.perf_counter()
        rows.check_view(view, data_size=self.layout.data_size)
        by_name = self._read(view, FORWARD_COLUMNS)
        batches = self._pack(list(by_name), by_name, columns=())
        top = self.distillation.asks_student if self.distillation else 0
        if top:
            answer = partial(student_columns, self.head, column=column, top=top)
            block = self._stored_columns(batches, self._forward(batches, answer))
        else:
            logprobs = self._forward(
                batches, lambda hidden, batch: self.head(hidden, batch)[0].cpu().numpy()
            )
            block = self._stored(batches, logprobs, column)
        return PassResult(block=block, metrics={}, seconds=time.perf_counter() - started)

    def compute_teacher(self, view: BatchView, column: str) -> PassResult:
        """The teacher's columns, at the student's positions (see distillation/base.py)."""
        started = time.perf_counter()
        mode = self.distillation
        if mode is None:
            raise TrainerError("this role was given no distillation; only a teacher answers here")
        rows.check_view(view, data_size=self.layout.data_size)
        asked = ("student_ids",) if mode.asks_student else ()
        by_name, seen = self._read_seen(view, FORWARD_COLUMNS + asked, mode)
        shown = self._pack(list(by_name), seen, columns=asked)
        batches = [
            packed_like(batch, by_name, columns=(), multiple=self.multiple) for batch in shown
        ]
        answers = self._forward(
            shown, lambda hidden, batch: teacher_columns(self.head, hidden, batch, mode)
        )
        block = self._stored_columns(batches, answers)
        return PassResult(block=block, metrics={}, seconds=time.perf_counter() - started)

    def _read_seen(
        self, view: BatchView, columns: Sequence[str], mode: Distillation | None
    ) -> tuple[dict[str, Row], dict[str, Row]]:
        """This rank's rows, and as the teacher sees them, if there is one."""
        if mode is None or mode.config.context == "same":
            by_name = self._read(view, columns)
            return by_name, by_name
        by_name = self._read(view, (*columns, "prompt_length"))
        hints = self._read(view, ("teacher_prompt_ids",))  # of another length than the rows
        seen = {
            name: seen_by_teacher(row, hints[name]["teacher_prompt_ids"])
            for name, row in by_name.items()
        }
        return by_name, seen

    def _stored_columns(
        self, batches: Sequence[PackedBatch], values: Sequence[Mapping[str, Array]]
    ) -> StoredBlock | None:
        return rows.store_columns(batches, values) if self.layout.owns_results else None

    def train(self, view: BatchView) -> TrainResult:
        """Raises TrainerError for an impossible batch, BudgetError after too many skipped steps."""
        started = time.perf_counter()
        algorithm = self._trained_by()
        rows.check_view(view, data_size=self.layout.data_size)
        earned = earned_steps(view.scalars)
        columns = self._columns(algorithm, with_steps=bool(earned))
        mode = self.distiller.mode if self.distiller else None
        by_name, seen = self._read_seen(view, FORWARD_COLUMNS + columns, mode)
        shares = self._shares(
            view,
            by_name,
            columns,
            algorithm=algorithm,
            make_targets=partial(self._advantages, earned),
        )
        if self.distiller is not None:
            shares = self.distiller.join(shares, algorithm)
        skipped = self.counters.skipped_steps
        parts = [self._train_on(shares[minibatch], seen) for minibatch in view.minibatches]
        pairs = [(b, t.targets_M.cpu().numpy()) for share in shares.values() for b, t in share]
        return TrainResult(
            metrics=over_steps(parts),
            skipped_steps=self.counters.skipped_steps - skipped,
            seconds=time.perf_counter() - started,
            block=self._stored([b for b, _ in pairs], [a for _, a in pairs], "advantages"),
        )

    def _columns(self, algorithm: Algorithm, *, with_steps: bool) -> tuple[str, ...]:
        """What is read of each row beside its tokens and mask."""
        names = ["rollout_logprobs", *algorithm.passes]
        if with_steps:
            names.append(STEP_INDEX)
        if self.distiller is not None:
            names += self.distiller.mode.columns
        return tuple(dict.fromkeys(names))

    def _train_on(self, share: Share, seen: Mapping[str, Row]) -> Mapping[str, Metric]:
        """One optimizer step; `seen` are the rows as a teacher in this rank reads them."""
        if self.distiller is not None:
            self.distiller.show([batch for batch, _ in share], seen)
        return self._optimizer_step(share, self._loss)

    def _advantages(
        self, earned: Earned, batches: Sequence[PackedBatch], outcome: Mapping[str, float]
    ) -> list[torch.Tensor]:
        made = step.advantages(self._trained_by(), batches, outcome=outcome, layout=self.layout)
        return with_steps(made, batches, earned) if earned else made

    def _loss(
        self, hidden: torch.Tensor, batch: PackedBatch, target: step.Targets | None
    ) -> tuple[torch.Tensor, Any]:
        """0 without loss tokens, thus also for a dummy micro-batch, whose `target` is None."""
        algorithm = self._trained_by()
        if target is None or batch.num_loss_tokens == 0:
            return hidden.sum() * 0.0, {}

        def policy_loss(logprobs_M: torch.Tensor, entropy_M: torch.Tensor) -> Any:
            return step.loss(logprobs_M, entropy_M, batch, algorithm=algorithm, target=target)

        if self.distiller is not None:
            return self.distiller.loss(hidden, batch, policy_loss)
        return policy_loss(*self.head(hidden, batch))  # type: ignore[no-any-return]

    def _trained_by(self) -> Algorithm:
        if self.algorithm is None:
            raise TrainerError("this role has no algorithm and can't be trained; train the actor")
        return self.algorithm

    def held_bytes(self) -> dict[str, int]:
        held = super().held_bytes()
        if self.distiller is not None and self.distiller.teacher is not None:
            held["weights"] += self.distiller.teacher.held_bytes()["weights"]
        return held

    def offload(self) -> None:
        super().offload()
        if self.distiller is not None and self.distiller.teacher is not None:
            self.distiller.teacher.offload()

    def onload(self) -> None:
        super().onload()
        if self.distiller is not None and self.distiller.teacher is not None:
            self.distiller.teacher.onload()

    def export_weights(self, dtype: str, stage: Stage) -> list[WeightChunk]:
        return export.weight_chunks(
            self.model,
            self.hf_config,
            dtype=getattr(torch, dtype),
            layout=self.layout,
            stage=stage,
        )
