"""One number per tensor: equal on the sender and, read back, on the receiver.

The number is a sum over elements, so the shards of a tensor can be hashed where they live and
added (tensor parallelism, fused parameters, chunked transfers):

    fingerprint(W) = sum_i bits(W_i) * weight(i)   mod 2^64,   i = flat index in the whole tensor

`weight` is odd and scattered (a multiplicative hash), so one changed bit always changes the sum,
and so does a swap of two different elements, except by an accident of about 2^-33.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlpost.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed int64
BLOCK = 1 << 18  # elements hashed at once: 2 MiB of int64 stays in cache


def fingerprint(tensor: torch.Tensor, start: int = 0, *, row_stride: int | None = None) -> int:
    """Hash of the bit patterns of `tensor`, 0 <= result < 2^64. Needs no float arithmetic.

    `start` is the flat index, in the whole tensor, of the first element of this shard.
    `row_stride` is the row length of the whole tensor when the shard holds only some of its
    columns (2-D shards, cut along the last axis); None means that the shard's elements follow
    each other in the whole tensor.
    """
    if row_stride is None:
        return _hash_run(_bits(tensor), start)
    rows = _bits(tensor).reshape(-1, tensor.shape[-1])
    return combine(_hash_run(row, start + index * row_stride) for index, row in enumerate(rows))


def combine(parts: Iterable[int]) -> int:
    """Fingerprint of a whole tensor from those of its disjoint shards."""
    return sum(parts) & MASK


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as integers of the same width, flat. Raises TypeError on exotic dtypes."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.is_complex() or tensor.is_quantized:
        raise TypeError(f"can't fingerprint a {tensor.dtype} tensor: use a float or integer dtype")
    return tensor.detach().contiguous().reshape(-1).view(integers[tensor.element_size()])


def _hash_run(bits: torch.Tensor, start: int) -> int:
    total = 0
    for low in range(0, bits.numel(), BLOCK):
        block = bits[low : low + BLOCK].to(torch.int64)
        total += int((block * _weights(start + low, block)).sum())
    return total & MASK


def _weights(start: int, like: torch.Tensor) -> torch.Tensor:
    """weight(i) = mix(i * GOLDEN) | 1 in wrapping int64, for i from `start` on."""
    index = torch.arange(start, start + len(like), dtype=torch.int64, device=like.device)
    index.mul_(GOLDEN)
    return index.bitwise_xor_(index >> 29).bitwise_or_(1)
