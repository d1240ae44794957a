"""What rlpost adds to vLLM's worker: loading full Hugging Face tensors, and reading them back.

vLLM imports this module in the process of each worker, before the model is built
(`worker_extension_cls`), and calls the methods by name, between two steps.
"""

from __future__ import annotations

import glob
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from vllm.platforms import current_platform

from rlpost.engines.live_weights import Piece, pieces
from rlpost.engines.packing import keep_plain_weights, repack, untrue_kernels
from rlpost.engines.rewind import rewind_by_state
from rlpost.fingerprint import fingerprint

if current_platform.is_cpu():
    keep_plain_weights()
    rewind_by_state()


class WorkerExtension:
    """Mixed into vLLM's Worker; every name carries a prefix because vLLM refuses clashes."""

    model_runner: Any

    def rlpost_shapes(self) -> dict[str, tuple[list[int], bool]]:
        """Hugging Face name -> (whole shape, whether an update may leave it out: tied names)."""
        found = pieces(self.model_runner.model)
        return {piece.name: (list(piece.shape), piece.alias) for piece in found}

    def rlpost_load(self, chunks: Sequence[tuple[Any, Any]]) -> None:
        """`chunks`: (manifest, uint8 numpy array or path of a file with the same bytes)."""
        model = self.model_runner.model
        for manifest, source in chunks:
            model.load_weights(_tensors(manifest, source))
        if current_platform.is_cpu():
            repack(model)

    def rlpost_fingerprints(self, names: Sequence[str]) -> dict[str, tuple[int, int]]:
        """name -> (start, fingerprint) of this rank's part of each tensor; equal starts: copies."""
        wanted = set(names)
        held = [piece for piece in pieces(self.model_runner.model) if piece.name in wanted]
        return {piece.name: (piece.start, self._hash(piece)) for piece in held}

    def rlpost_untrue_kernels(self) -> list[str]:
        return untrue_kernels(self.model_runner.model) if current_platform.is_cpu() else []

    def rlpost_shared_files(self) -> list[str]:
        """Files by which several CPU ranks share memory; vLLM never removes them."""
        group = os.environ.get("VLLM_DIST_IDENT")
        found = Path("/dev/shm").glob(f"*{glob.escape(group)}*") if group else []
        return [str(path) for path in found]

    def _hash(self, piece: Piece) -> int:
        # The CPU kernels want some biases in float32; the cast back to the model's type is exact.
        tensor = piece.read().to(self.model_runner.model_config.dtype)
        return fingerprint(tensor, piece.start, row_stride=piece.row_stride)


def _tensors(manifest: Any, source: Any) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(source, str) and source.endswith(".safetensors"):
        whole: dict[str, torch.Tensor] = load_file(source)
        return whole.items()
    return _views(manifest, _bytes(source))


def _bytes(source: Any) -> torch.Tensor:
    if isinstance(source, str):
        size = np.memmap(source, mode="r").size
        return torch.from_file(source, shared=True, size=size, dtype=torch.uint8)
    with warnings.catch_warnings():
        # The object store's arrays are read-only, and so are we.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(source)


def _views(manifest: Any, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype_name, shape, offset in manifest:
        dtype = getattr(torch, dtype_name)
        size = math.prod(shape) * dtype.itemsize
        yield name, buffer[offset : offset + size].view(dtype).view(*shape)
