"""Megatron's distributed optimizer on torch's AdamW: build, clip, step or skip."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from rlpost.trainers.megatron.options import OptimizerConfig


@dataclass(frozen=True)
class StepOutcome:
    """`grad_norm` before clipping, over all ranks. Not `applied`: it was not finite."""

    grad_norm: float
    applied: bool


def wrap(model: GPTModel) -> DistributedDataParallel:
    """Gives `model` gradient buffers whose reduction over data-parallel ranks is a plain sum.

    The algorithm's weights already carry the normalisation over the whole optimizer step, hence
    no division by ranks (`calculate_per_token_loss` in the model's config) or by tokens.
    """
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    wrapped = DistributedDataParallel(model.config, settings, model)
    model.config.finalize_model_grads_func = _sum_gradients
    _count_padding_between_buckets(wrapped)
    return wrapped


def _count_padding_between_buckets(wrapped: DistributedDataParallel) -> None:
    """Megatron 0.16 saves the optimizer state of a buffer without the padding between its buckets
    but cuts it up with offsets that include it: silently wrong values for all later buckets. A tied
    embedding under pipeline parallelism has a bucket of its own, so this happens. Counting the
    padding as content makes both agree."""
    for buffer in wrapped.buffers + wrapped.expert_parallel_buffers:
        for bucket in buffer.buckets[:-1]:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)


def _sum_gradients(model: Sequence[Any], num_tokens: Any = None, **options: Any) -> None:
    finalize_model_grads(model, num_tokens=None, **options)


def build(model: DistributedDataParallel, options: OptimizerConfig, dtype: torch.dtype) -> Any:
    """The optimizer over the wrapped model's trainable parameters, its state already allocated."""
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=0.0,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        clip_grad=options.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, [model])
    for part in torch_parts(optimizer):
        _use_fused(part.optimizer)
        _allocate_state(part.optimizer)
        part._set_main_param_and_optimizer_states = _Restorer(part)
    return optimizer


def torch_parts(optimizer: Any) -> Iterator[Any]:
    """The distributed optimizers that run torch's AdamW (not Transformer Engine's or Apex's)."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.AdamW):
            yield part


def _use_fused(adam: torch.optim.AdamW) -> None:
    """One kernel for all parameters: 1.6 times faster than the loop on a CPU."""
    for group in adam.param_groups:
        group["fused"], group["foreach"] = True, False


def _allocate_state(adam: torch.optim.AdamW) -> None:
    """Megatron can save and load only an optimizer that has its state, which torch creates in the
    first step. A step made up for that purpose would apply weight decay."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
            }


class _Restorer:
    """Replaces the method of Megatron 0.16 that puts loaded tensors into the optimizer.

    The original expects torch's per-parameter "step" among the tensors, where it is not, and
    writes into leaf variables outside no_grad.
    """

    def __init__(self, part: Any) -> None:
        self._part = part

    @torch.no_grad()
    def __call__(self, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        group, order = self._part.model_param_group_index_map[model_param]
        main_param = self._part.optimizer.param_groups[group]["params"][order]
        main_param.copy_(tensors["param"])
        for key in ("exp_avg", "exp_avg_sq"):
            self._part.optimizer.state[main_param][key].copy_(tensors[key])


def unshare_steps(optimizer: Any) -> None:
    """Call after loading: Megatron gives all parameters one "step" tensor, to which torch then adds
    1 for each parameter at each optimizer step."""
    for part in torch_parts(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


@torch.no_grad()
def apply_gradients(optimizer: Any, *, lr: float, clip_grad: float) -> StepOutcome:
    """One optimizer step, or none when the gradient norm is not finite. Equal on all ranks."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if not math.isfinite(grad_norm):
        return StepOutcome(grad_norm, applied=False)
    if clip_grad > 0.0:
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        parameters = [parameter for part in parts for parameter in part.get_parameters()]
        clip_grad_by_total_norm_fp32(parameters, clip_grad, grad_norm)
    optimizer.step_with_ready_grads()
    return StepOutcome(grad_norm, applied=True)
