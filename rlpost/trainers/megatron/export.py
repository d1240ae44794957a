"""Full Hugging Face tensors out of the ranks: as weight chunks, or gathered for a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from rlpost.engines.base import Stage, TensorSpec, WeightChunk
from rlpost.fingerprint import fingerprint
from rlpost.trainers.megatron import converter, device, hf_io
from rlpost.trainers.megatron.layout import Layout
from rlpost.trainers.megatron.memory import CHUNK_BYTES

ALIGNMENT = 64  # bytes; what TensorSpec.offset promises

Named = tuple[str, torch.Tensor]


def weight_chunks(
    model: GPTModel, hf_config: Any, *, dtype: torch.dtype, layout: Layout, stage: Stage
) -> list[WeightChunk]:
    """The stage's weights on its exporting rank, else []. All ranks of the role call."""
    if layout.data_rank != 0:
        return []
    tensors = converter.export_hf(model, hf_config, dtype)
    if layout.exports:
        return list(_chunks(tensors, stage))
    _take_part(tensors)
    return []


def write_hf(
    path: str, model: GPTModel, hf_config: Any, *, dtype: torch.dtype, source: str, layout: Layout
) -> None:
    """Writes a complete folder. All ranks call and return when it is there.

    It has one file of weights, so the writing rank needs the whole model in CPU memory.
    """
    if layout.data_rank == 0:
        tensors = _gather_stages(converter.export_hf(model, hf_config, dtype), layout)
        if layout.exports and layout.stage == 0:
            hf_io.write_folder(path, tensors, hf_config=hf_config, dtype=dtype, source=source)
        else:
            _take_part(tensors)
    dist.barrier()


def _take_part(tensors: Iterable[Named]) -> None:
    """Iterates to the end for the collectives inside; the tensors are another rank's to keep."""
    for _ in tensors:
        pass


def _chunks(tensors: Iterable[Named], stage: Stage) -> Iterator[WeightChunk]:
    """Stages tensors in chunks of about CHUNK_BYTES."""
    bucket: list[Named] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > CHUNK_BYTES:
            yield _chunk(bucket, stage)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += _aligned(tensor.nbytes)
    if bucket:
        yield _chunk(bucket, stage)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _chunk(bucket: list[Named], stage: Stage) -> WeightChunk:
    specs = []
    offset = 0
    for name, tensor in bucket:
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, dtype, tuple(tensor.shape), offset))
        offset += _aligned(tensor.nbytes)
    return WeightChunk(
        specs=tuple(specs),
        buffer=stage(specs, [tensor for _, tensor in bucket], offset),
        fingerprints={name: fingerprint(tensor) for name, tensor in bucket},
    )


def _gather_stages(tensors: Iterable[Named], layout: Layout) -> Iterator[Named]:
    """Brings every pipeline stage's tensors to the first stage, which yields them all.

    The ranks of one pipeline call it and iterate to the end; later stages yield nothing.
    """
    if layout.stage == 0:
        yield from tensors
        for stage in range(1, layout.num_stages):
            yield from _receive(stage)
    else:
        _send(list(tensors))


def _send(tensors: list[Named]) -> None:
    group = parallel_state.get_pipeline_model_parallel_group()
    first = dist.get_global_rank(group, 0)
    heads = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
    dist.send_object_list([heads], dst=first, group=group, device=device.device())
    for _, tensor in tensors:
        dist.send(tensor.contiguous(), dst=first, group=group)


def _receive(stage: int) -> Iterator[Named]:
    group = parallel_state.get_pipeline_model_parallel_group()
    source = dist.get_global_rank(group, stage)
    heads: list[Any] = [None]
    dist.recv_object_list(heads, src=source, group=group, device=device.device())
    for name, shape, dtype in heads[0]:
        tensor = torch.empty(shape, dtype=dtype, device=device.device())
        dist.recv(tensor, src=source, group=group)
        yield name, tensor
