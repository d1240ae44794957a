"""Hugging Face names for the fused, sharded, packed parameters of a live vLLM model.

Used inside vLLM's worker. `pieces(model)` describes, for this tensor-parallel rank, which part of
which Hugging Face tensor each parameter holds; completeness checks and fingerprints rest on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
Read = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """Part of Hugging Face tensor `name` (whole shape `shape`) that this rank holds.

    `start` and `row_stride` place it in the whole tensor (see rlpost.fingerprint); pieces of
    different ranks with the same start are copies.
    `alias` marks a tied parameter: the tensor under another name, optional in an update.
    """

    name: str
    shape: tuple[int, ...]
    read: Read
    start: int = 0
    row_stride: int | None = None
    alias: bool = False


def pieces(model: torch.nn.Module) -> list[Piece]:
    """All pieces of this rank. Raises ValueError for layouts that can't be read back."""
    fused = {**FUSED, **getattr(model, "packed_modules_mapping", {})}
    found: list[Piece] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for field, parameter in module.named_parameters(recurse=False):
            tied = id(parameter) in seen
            seen.add(id(parameter))
            for piece in _pieces_of(prefix, module, field, fused):
                found.append(Piece(**{**vars(piece), "alias": True}) if tied else piece)
    return found


def _pieces_of(
    prefix: str, module: Any, field: str, fused: Mapping[str, list[str]]
) -> Iterator[Piece]:
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    read = _reader(module, field)
    name = f"{prefix}.{field}"
    if hasattr(module, "w13_weight") and field in ("w13_weight", "w2_weight"):
        yield from _expert_pieces(prefix, module, field)
    elif isinstance(module, VocabParallelEmbedding):
        yield _vocab_piece(name, module, read)
    elif isinstance(module, QKVParallelLinear):
        yield from _qkv_pieces(prefix, module, field, fused)
    elif isinstance(module, ColumnParallelLinear):
        yield from _column_pieces(prefix, module, field, fused)
    elif isinstance(module, RowParallelLinear) and field == "weight":
        local = module.input_size_per_partition
        shape = (read().shape[0], module.input_size)
        yield Piece(name, shape, read, module.tp_rank * local, row_stride=module.input_size)
    else:
        yield Piece(name, tuple(read().shape), read)


def _reader(module: Any, field: str, low: int = 0, high: int | None = None) -> Read:
    """Rows [low, high) as they are when called, not as they were when the model was built."""
    return lambda: getattr(module, field).data[low:high]


def _row_width(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:])


def _vocab_piece(name: str, module: Any, read: Read) -> Piece:
    """Rows beyond the vocabulary are padding and belong to no Hugging Face tensor."""
    shard = module.shard_indices
    width = _row_width(read())
    shape = (module.org_vocab_size, *read().shape[1:])
    rows = shard.num_org_elements
    return Piece(name, shape, lambda: read()[:rows], shard.org_vocab_start_index * width)


def _qkv_pieces(
    prefix: str, module: Any, field: str, fused: Mapping[str, list[str]]
) -> Iterator[Piece]:
    """Query, key and value rows; a key/value head may be copied to several ranks."""
    heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
    totals = (module.total_num_heads, module.total_num_kv_heads, module.total_num_kv_heads)
    sizes = (module.head_size, module.head_size, module.v_head_size)
    copies = (1, module.num_kv_head_replicas, module.num_kv_head_replicas)
    low = 0
    for name, count, total, size, copy in zip(
        _names(prefix, fused), heads, totals, sizes, copies, strict=True
    ):
        read = _reader(module, field, low, low + count * size)
        first = module.tp_rank // copy * count * size * _row_width(read())
        shape = (total * size, *read().shape[1:])
        yield Piece(f"{name}.{field}", shape, read, first)
        low += count * size


def _column_pieces(
    prefix: str, module: Any, field: str, fused: Mapping[str, list[str]]
) -> Iterator[Piece]:
    """Rows are cut over ranks; a fused layer holds its rank's rows of each part in turn."""
    names = _names(prefix, fused)
    totals = list(getattr(module, "output_sizes", [module.output_size]))
    low = 0
    for name, total in zip(names, totals, strict=True):
        rows = total // module.tp_size
        read = _reader(module, field, low, low + rows)
        first = module.tp_rank * rows * _row_width(read())
        yield Piece(f"{name}.{field}", (total, *read().shape[1:]), read, first)
        low += rows


def _names(prefix: str, fused: Mapping[str, list[str]]) -> list[str]:
    parent, _, last = prefix.rpartition(".")
    return [f"{parent}.{part}" for part in fused[last]] if last in fused else [prefix]


def _expert_pieces(prefix: str, module: Any, field: str) -> Iterator[Piece]:
    """One tensor per expert and projection. w13 holds gate rows, then up rows; w2 is cut by column.

    On a CPU both are stored packed for the kernels and are unpacked to be read.
    """
    from rlpost.engines.packing import unpacked

    parallel = module.moe_config.moe_parallel_config
    if parallel.use_ep:
        raise ValueError(f"{prefix}: weights under expert parallelism can't be read back")
    hidden = module.moe_config.hidden_dim
    local = module.moe_config.intermediate_size_per_partition
    whole = local * parallel.tp_size
    _check_unpadded(prefix, getattr(module, field), field, local)
    parent = prefix.removesuffix(".routed_experts")
    for _, weight_name, expert, part in module.get_expert_mapping():
        name = f"{parent}.{weight_name.removeprefix('experts.')}weight"
        if part == "w2" and field == "w2_weight":
            first = parallel.tp_rank * local
            read = _expert_reader(unpacked, module, field, expert, 0, hidden)
            yield Piece(name, (hidden, whole), read, first, row_stride=whole)
        elif part != "w2" and field == "w13_weight":
            low = 0 if part == "w1" else local
            read = _expert_reader(unpacked, module, field, expert, low, low + local)
            yield Piece(name, (whole, hidden), read, parallel.tp_rank * local * hidden)


def _expert_reader(
    unpacked: Callable[[Any, str, int], torch.Tensor],
    module: Any,
    field: str,
    expert: int,
    low: int,
    high: int,
) -> Read:
    return lambda: unpacked(module, field, expert)[low:high]


def _check_unpadded(prefix: str, weight: torch.Tensor, field: str, local: int) -> None:
    stored = weight.shape[1] // 2 if field == "w13_weight" else weight.shape[2]
    if stored != local:
        raise ValueError(
            f"{prefix}.{field}: vLLM padded moe_intermediate_size {local} to {stored}, which can't "
            "be updated in place; use a model whose size per rank is a multiple of 32"
        )
