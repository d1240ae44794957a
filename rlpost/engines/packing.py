"""What vLLM's CPU backend derives from weights, kept true to them across updates.

On load the CPU backend packs weights for its kernels and throws the plain ones away. An update
then either fails, or leaves a tied lm_head and the experts on old or unpacked bytes without a
word. So: plain weights of linear layers are kept, and everything derived is rebuilt after a load.
Costs one more copy of the linear weights in RAM. Nothing here acts on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import vllm.model_executor.layers.utils as layer_utils

_dispatch = layer_utils.dispatch_cpu_unquantized_gemm


def keep_plain_weights() -> None:
    """Must run before the model is built. Running it twice is harmless."""

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        _dispatch(layer, remove_weight=False)

    layer_utils.dispatch_cpu_unquantized_gemm = keep


def repack(model: torch.nn.Module) -> None:
    """Rebuilds every kernel's packed copy; all experts must have been loaded since the last."""
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            _dispatch(module, remove_weight=False)
        isa = packed_for(module)
        if isa is not None:
            for field in ("w13_weight", "w2_weight"):
                weight = getattr(module, field).data
                weight.copy_(_pack(weight, isa))


def packed_for(module: Any) -> str | None:
    """The instruction set for which a module's experts are packed, or None if they are plain."""
    if not hasattr(module, "w13_weight"):
        return None
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    if experts is None or getattr(experts, "_use_zentorch", False):
        return None
    return getattr(experts, "isa", None)


def unpacked(module: Any, field: str, expert: int) -> torch.Tensor:
    """One expert's matrix [rows, columns] as it was before packing."""
    weight = getattr(module, field).data[expert]
    isa = packed_for(module)
    if isa is None:
        return weight  # type: ignore[no-any-return]
    plain = torch.empty_like(weight).flatten()
    plain[_packing_order(tuple(weight.shape), weight.dtype, isa)] = weight.flatten()
    return plain.view(weight.shape)


@functools.cache
def _packing_order(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> torch.Tensor:
    """order [n] with packed.flat[i] = plain.flat[order[i]], found by packing the index itself.

    The index goes through in base-256 digits, which even bfloat16 holds exactly.
    """
    index = torch.arange(shape[0] * shape[1])
    order = torch.zeros_like(index)
    for shift in range(0, max(1, (len(index) - 1).bit_length()), 8):
        digit = ((index >> shift) & 255).to(dtype).view(1, *shape)
        order += _pack(digit, isa).flatten().to(torch.int64) << shift
    if not torch.equal(order.sort().values, index):
        raise ValueError(f"experts packed for {isa!r} can't be unpacked: no permutation")
    return order


def _pack(weight: torch.Tensor, isa: str) -> torch.Tensor:
    from vllm._custom_ops import cpu_prepack_moe_weight

    return cpu_prepack_moe_weight(weight, isa)  # type: ignore[no-any-return]


def untrue_kernels(model: torch.nn.Module) -> list[str]:
    """Layers whose kernel, fed the identity, does not give back the stored weight."""
    bad = []
    for name, module in model.named_modules():
        if hasattr(module, "cpu_linear") and module.weight.ndim == 2:
            weight: Any = module.weight
            eye = torch.eye(weight.shape[1], dtype=weight.dtype)
            if not torch.equal(module.cpu_linear(eye, weight, None).t(), weight):
                bad.append(name)
    return bad
