"""Causal attention over packed sequences, on torch's scaled dot product attention.

Letters: T packed tokens, s tokens of one sequence, h query heads, g key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from rlpost.trainers.megatron.device import device


@dataclass
class PackedLengths(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a packed batch, plus the lengths as plain integers.

    The integers spare every layer a wait for the device to read `cu_seqlens`.
    """

    lengths: tuple[int, ...] = ()


def packed(lengths: Sequence[int]) -> PackedLengths:
    """Sequences of these lengths laid end to end: packed([3, 2]) has cu_seqlens [0, 3, 5]."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().to(device())
    return PackedLengths(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=tuple(lengths),
    )


def causal_attention(
    query_s: torch.Tensor, key_s: torch.Tensor, value_s: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """One sequence: query [s, h, d], key and value [s, g, d] -> [s, h, d]."""
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query_s, key_s, value_s))
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1)


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Core attention of a layer: each packed sequence attends to itself alone.

    The answer for a sequence does not depend on what it is packed with, bit for bit.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedLengths | None = None,
    ) -> torch.Tensor:
        """query [T, h, d], key and value [T, g, d] -> [T, h, d]."""
        assert packed_seq_params is not None, "this attention takes packed sequences only"
        lengths = list(packed_seq_params.lengths)
        parts = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
        return torch.cat([causal_attention(q, k, v, self.scale) for q, k, v in parts])
