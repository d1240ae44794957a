"""The one Hugging Face <-> Megatron weight converter: loading, weight sync and export use it.

Rules: query, key and value rows are interleaved per query group, `[q.. k v]`, then cut into
contiguous tensor-parallel shares; `linear_fc1` holds `[gate; up]` of each share; the vocabulary is
padded with zero rows; with tied weights the last pipeline stage has a copy of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rlpost.errors import ModelError
from rlpost.trainers.megatron.weight_names import HEAD, Mapped, map_name, merge_qkv, split_qkv

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel


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
    if mapped.kind == "vocab":
        rank = parallel_state.get_tensor_model_parallel_rank()
        return _vocab_rows(tensors[0], rank * len(parameter), len(parameter))
    if mapped.kind == "glu":
        return torch.cat([_cut(tensor, dim=0) for tensor in tensors])
    if mapped.kind == "qkv":
        return _cut(merge_qkv(tensors, hf_config.num_key_value_heads), dim=0)
    return _cut(tensors[0], _sharded_dim(parameter)) if _is_sharded(parameter) else tensors[0]


def _cut(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    tp = parallel_state.get_tensor_model_parallel_world_size()
    share: torch.Tensor = torch.chunk(tensor, tp, dim)[
        parallel_state.get_tensor_model_parallel_rank()
    ]
    return share


def _vocab_rows(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """`count` rows from `first` on; those past the real vocabulary are zero."""
    rows = tensor[first : first + count]
    return torch.cat([rows, rows.new_zeros(count - len(rows), tensor.shape[1])])


def _is_sharded(parameter: torch.nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _sharded_dim(parameter: torch.nn.Parameter) -> int:
    return int(parameter.partition_dim)  # type: ignore[attr-defined]


@torch.no_grad()
def export_hf(
    model: GPTModel, hf_config: Any, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, full tensor) of this pipeline stage's layers, in `dtype`.

    Collective over tensor parallel: all its ranks iterate to the end and get the same tensors.
    The tied copy of the embedding on the last stage is left out.
    """
    for name, parameter, mapped in _parameters(model, hf_config):
        if name == HEAD and hf_config.tie_word_embeddings:
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
    return [torch.cat(shares, dim=_sharded_dim(parameter))]


def _gather(share: torch.Tensor, *, sharded: bool) -> list[torch.Tensor]:
    """This parameter's shares of all tensor-parallel ranks."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    if tp == 1 or not sharded:
        return [share]
    shares = [torch.empty_like(share) for _ in range(tp)]
    group = parallel_state.get_tensor_model_parallel_group()
    dist.all_gather(shares, share.contiguous(), group=group)
    return shares
