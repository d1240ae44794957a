"""Micro-batches through the model, by Megatron's schedules. Letters as in packing.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlpost.errors import TrainerError
from rlpost.trainers.megatron import device
from rlpost.trainers.megatron.logprobs import (
    VocabShard,
    logprobs_and_entropy,
    support_logprobs,
)
from rlpost.trainers.megatron.model import forward_packed, output_weight
from rlpost.trainers.megatron.packing import PackedBatch
from rlpost.trainers.megatron.support import Frozen, Scores, full_divergence, score


@dataclass(frozen=True)
class Head:
    """Turns the last stage's hidden states into log-probs of the loss tokens."""

    model: GPTModel
    vocab_size: int
    temperature: float
    chunk: int

    def __call__(
        self, hidden: torch.Tensor, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [1, T, H] -> (log-probs [M], entropy [M])."""
        return logprobs_and_entropy(
            self.predicting(hidden, batch),
            output_weight(self.model),
            self._to_device(batch.targets_M),
            **self._settings(),
        )

    def at(
        self, hidden: torch.Tensor, batch: PackedBatch, ids_MK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(log-probs [M], entropy [M], log-probs at more ids [M, K]) from one pass over logits."""
        targets_M1 = self._to_device(batch.targets_M)[:, None]
        logprobs, entropy_M = support_logprobs(
            self.predicting(hidden, batch),
            output_weight(self.model),
            torch.cat([targets_M1, ids_MK], dim=1),
            **self._settings(),
        )
        return logprobs[:, 0], entropy_M, logprobs[:, 1:]

    def score(
        self, hidden: torch.Tensor, batch: PackedBatch, ids_MK: torch.Tensor | None, *, top: int
    ) -> Scores:
        """Of the targets, then of `ids_MK`, without gradients; and the `top` likeliest ids."""
        targets_M1 = self._to_device(batch.targets_M)[:, None]
        ids = targets_M1 if ids_MK is None else torch.cat([targets_M1, ids_MK], dim=1)
        return score(
            self.predicting(hidden, batch),
            output_weight(self.model),
            ids,
            top=top,
            **self._settings(),
        )

    def divergence(
        self, hidden: torch.Tensor, batch: PackedBatch, teacher: Frozen, **how: Any
    ) -> torch.Tensor:
        """[M] from the teacher, over the whole vocabulary."""
        return full_divergence(
            self.predicting(hidden, batch),
            output_weight(self.model),
            teacher,
            **how,
            **self._settings(),
        )

    def predicting(self, hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """[M, H]: the hidden states from which the loss tokens are predicted."""
        return hidden[0].index_select(0, self._to_device(batch.hidden_rows_M))

    def frozen(self, hidden_MH: torch.Tensor) -> Frozen:
        """This model as the teacher's side of a divergence."""
        return Frozen(hidden_MH, output_weight(self.model).detach(), self.temperature)

    def _settings(self) -> dict[str, Any]:
        return {"shard": self._shard(), "temperature": self.temperature, "chunk": self.chunk}

    def _to_device(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(device.device())

    def _shard(self) -> VocabShard:
        num_ranks = parallel_state.get_tensor_model_parallel_world_size()
        rows = len(output_weight(self.model))
        return VocabShard(
            first=rows * parallel_state.get_tensor_model_parallel_rank(),
            size=self.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group() if num_ranks > 1 else None,
        )


def run_micro_batches(
    model: Any, batches: Sequence[PackedBatch], consume: Callable[..., Any], *, train: bool
) -> list[Any]:
    """Runs all micro-batches, with backward passes when `train`.

    On the last pipeline stage `consume(hidden, batch)` is called for each: in training it returns
    (loss, data), else data. Returns the list of data there, an empty list on other stages.
    """

    def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(batches)
        token_ids = torch.from_numpy(batch.token_ids_T).to(device.device())
        hidden = forward_packed(model, token_ids, batch.lengths)
        if train:
            return hidden, lambda output: _for_schedule(*consume(output, batch))
        return hidden, lambda output, non_loss_data: consume(output, batch)

    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=1,  # not read: variable_seq_lengths makes stages exchange shapes
        micro_batch_size=1,
        forward_only=not train,
        collect_non_loss_data=not train,
    )
    return collected


def _for_schedule(loss: torch.Tensor, data: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Megatron's (loss, number of tokens, data) form, which keeps it from averaging the loss over
    micro-batches; the number is not used, since gradients are summed (see optimizer.wrap)."""
    return loss, torch.zeros((), dtype=torch.int), data


def check_token_ids(batches: Sequence[PackedBatch], vocab_size: int) -> None:
    """Raises TrainerError: an id outside the vocabulary would read a padding row or crash."""
    for batch in batches:
        if batch.token_ids_T.min() < 0 or batch.token_ids_T.max() >= vocab_size:
            raise TrainerError(
                f"a token id of samples {', '.join(batch.sample_ids[:3])}, ... lies outside the "
                f"vocabulary of the model (0 to {vocab_size - 1}); use the model's own tokenizer"
            )
