"""Which Hugging Face tensors make up a Megatron parameter, and how rows are laid out. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rlpost.errors import ModelError

Kind = Literal["plain", "vocab", "qkv", "glu"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
HEAD = "output_layer.weight"
LABELS_HEAD = "score."  # of transformers' ...ForTokenClassification models
VALUE_HEAD = "value_head."  # a critic's own tensors; no transformers model has them
_EMBEDDING = "model.embed_tokens.weight"
_OF_MODEL: dict[str, tuple[Kind, str]] = {
    "embedding.word_embeddings.weight": ("vocab", _EMBEDDING),
    "decoder.final_layernorm.weight": ("plain", "model.norm.weight"),
    HEAD: ("vocab", "lm_head.weight"),
    "output_layer.value_weight": ("plain", f"{VALUE_HEAD}weight"),
    "output_layer.value_bias": ("plain", f"{VALUE_HEAD}bias"),
    "output_layer.labels_weight": ("plain", f"{LABELS_HEAD}weight"),
    "output_layer.labels_bias": ("plain", f"{LABELS_HEAD}bias"),
}
_OF_LAYER: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "input_layernorm.weight": ("plain", ("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": ("plain", ("post_attention_layernorm.weight",)),
    "self_attention.q_layernorm.weight": ("plain", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("plain", ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": ("plain", ("self_attn.o_proj.weight",)),
    "self_attention.linear_qkv.weight": ("qkv", tuple(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": ("qkv", tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "mlp.linear_fc1.weight": ("glu", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("plain", ("mlp.down_proj.weight",)),
    "mlp.router.weight": ("plain", ("mlp.gate.weight",)),
}


@dataclass(frozen=True, slots=True)
class Mapped:
    """How one Megatron parameter is made of Hugging Face tensors."""

    kind: Kind
    hf_names: tuple[str, ...]


def map_name(name: str, *, first_layer: int, tied: bool) -> Mapped:
    """Megatron parameter of a stage whose first layer is the model's `first_layer` (from 0).

    map_name("decoder.layers.1.mlp.linear_fc2.weight", first_layer=4, tied=False)
        == Mapped("plain", ("model.layers.5.mlp.down_proj.weight",))
    """
    if name in _OF_MODEL:
        kind, hf_name = _OF_MODEL[name]
        return Mapped(kind, (_EMBEDDING if tied and name == HEAD else hf_name,))
    match = _LAYER.fullmatch(name)
    found = _map_in_layer(match[2]) if match else None
    if match is None or found is None:
        raise ModelError(f"no Hugging Face name is known for the Megatron parameter {name!r}")
    prefix = f"model.layers.{first_layer + int(match[1])}."
    return Mapped(found[0], tuple(prefix + part for part in found[1]))


def _map_in_layer(rest: str) -> tuple[Kind, tuple[str, ...]] | None:
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        return _OF_LAYER.get(rest)
    prefix = f"mlp.experts.{expert[1]}."
    if expert[2] == "linear_fc1":
        return "glu", (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    return "plain", (f"{prefix}down_proj.weight",)


def merge_qkv(parts: Sequence[torch.Tensor], num_groups: int) -> torch.Tensor:
    """[q, k, v] with heads along dim 0 -> rows per query group: q of its heads, then k, then v."""
    grouped = [part.reshape(num_groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def split_qkv(merged: torch.Tensor, num_groups: int, heads_per_group: int) -> list[torch.Tensor]:
    """Inverse of merge_qkv."""
    grouped = merged.reshape(num_groups, heads_per_group + 2, -1, *merged.shape[1:])
    query = grouped[:, :heads_per_group].flatten(0, 2)
    return [query, *(grouped[:, heads_per_group + i].flatten(0, 1) for i in range(2))]
