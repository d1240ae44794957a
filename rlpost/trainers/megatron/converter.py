"""The one Hugging Face <-> Megatron weight converter: loading, weight sync and export use it.

Rules: query, key and value rows are interleaved per query group, `[q.. k v]`, then cut into
contiguous tensor-parallel shares; `linear_fc1` holds `[gate; up]` of each share; the vocabulary is
padded with zero rows; with tied weights the last pipeline stage has a copy of the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from rlpost.errors import ModelError

Kind = Literal["plain", "vocab", "qkv", "glu"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_HEAD = "output_layer.weight"
_EMBEDDING = "model.embed_tokens.weight"
_OF_MODEL: dict[str, tuple[Kind, str]] = {
    "embedding.word_embeddings.weight": ("vocab", _EMBEDDING),
    "decoder.final_layernorm.weight": ("plain", "model.norm.weight"),
    _HEAD: ("vocab", "lm_head.weight"),
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
        return Mapped(kind, (_EMBEDDING if tied and name == _HEAD else hf_name,))
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


def _parameters(
    model: GPTModel, hf_config: Any
) -> Iterator[tuple[str, torch.nn.Parameter, Mapped]]:
    first_layer = model.decoder.layers[0].layer_number - 1
    for name, parameter in model.named_parameters():
        mapped = map_name(name, first_layer=first_layer, tied=hf_config.tie_word_embeddings)
        yield name, parameter, mapped


@torch.no_grad()
def load_hf(model: GPTModel, hf_config: Any, get_tensor: Callable[[str], torch.Tensor]) -> None:
    """Fills this rank's weights. `get_tensor(name)` gives a full Hugging Face tensor.

    Raises ModelError naming the tensor when a shape is not what config.json promises.
    """
    for _, parameter, mapped in _parameters(model, hf_config):
        share = _local_share(parameter, mapped, [get_tensor(n) for n in mapped.hf_names], hf_config)
        if share.shape != parameter.shape:
            raise ModelError(
                f"{' + '.join(mapped.hf_names)} gives {tuple(share.shape)} for this rank, but "
                f"config.json makes it {tuple(parameter.shape)}; weights and config don't match"
            )
        parameter.copy_(share)


def _local_share(
    parameter: torch.nn.Parameter, mapped: Mapped, tensors: list[torch.Tensor], hf_config: Any
) -> torch.Tensor:
    """The rows or columns of the full tensors that this tensor-parallel rank holds."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    if mapped.kind == "qkv":
        return merge_qkv(tensors, hf_config.num_key_value_heads).chunk(tp)[rank]
    if mapped.kind == "glu":
        return torch.cat([tensor.chunk(tp)[rank] for tensor in tensors])
    if mapped.kind == "vocab":
        rows = tensors[0][rank * len(parameter) : (rank + 1) * len(parameter)]
        padding = rows.new_zeros(len(parameter) - len(rows), rows.shape[1])
        return torch.cat([rows, padding])
    if _is_sharded(parameter):
        return tensors[0].chunk(tp, parameter.partition_dim)[rank]  # type: ignore[attr-defined]
    return tensors[0]


def _is_sharded(parameter: torch.nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


@torch.no_grad()
def export_hf(
    model: GPTModel, hf_config: Any, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, full tensor) of this pipeline stage's layers, in `dtype`.

    Collective over tensor parallel: all its ranks iterate to the end and get the same tensors.
    The tied copy of the embedding on the last stage is left out.
    """
    for name, parameter, mapped in _parameters(model, hf_config):
        if name == _HEAD and hf_config.tie_word_embeddings:
            continue
        shares = _gather(parameter.detach().to(dtype), sharded=_is_sharded(parameter))
        yield from zip(mapped.hf_names, _to_hf(parameter, mapped, shares, hf_config), strict=True)


def _to_hf(
    parameter: torch.nn.Parameter, mapped: Mapped, shares: list[torch.Tensor], hf_config: Any
) -> list[torch.Tensor]:
    """All ranks' shares -> full tensors, in the order of `mapped.hf_names`."""
    if mapped.kind == "qkv":
        groups = hf_config.num_key_value_heads
        return split_qkv(torch.cat(shares), groups, hf_config.num_attention_heads // groups)
    if mapped.kind == "glu":
        halves = [share.chunk(2) for share in shares]
        return [torch.cat(half) for half in zip(*halves, strict=True)]
    if mapped.kind == "vocab":
        return [torch.cat(shares)[: hf_config.vocab_size]]
    if len(shares) == 1:
        return shares
    return [torch.cat(shares, dim=parameter.partition_dim)]  # type: ignore[attr-defined]


def _gather(share: torch.Tensor, *, sharded: bool) -> list[torch.Tensor]:
    """This parameter's shares of all tensor-parallel ranks."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    if tp == 1 or not sharded:
        return [share]
    shares = [torch.empty_like(share) for _ in range(tp)]
    group = parallel_state.get_tensor_model_parallel_group()
    dist.all_gather(shares, share.contiguous(), group=group)
    return shares
