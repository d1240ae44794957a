"""Megatron's checkpoint format, written by the rank itself.

Megatron forks writers and collects their results through a manager process. A rank holds threads
(Gloo's, Ray's, CUDA's) that do not survive a fork, the manager costs a Python start, and on a busy
machine a save failed now and then with "results_queue should not be empty".
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from rlpost.errors import CheckpointError

FORMAT = ("torch_dist", 1)


class InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """One file for each rank that owns anything. All ranks call `save`."""

    def __init__(self) -> None:
        super().__init__(*FORMAT, thread_count=1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Raises CheckpointError when a file can't be written."""
        filesystem_async._results_queue = queue.Queue()  # made here, Megatron starts no manager
        request = self.async_save(sharded_state_dict, checkpoint_dir)
        if request.async_fn is not None:
            (transforms, _) = request.async_fn.args
            request = request._replace(async_fn=functools.partial(write, transforms))
        request.execute_sync()


def write(
    transforms: list[Any], rank: int, buckets: Sequence[Any], results: queue.Queue[Any]
) -> None:
    """In place of FileSystemWriterAsync.write_preloaded_data_multiproc."""
    results.put(
        {index: write_bucket(transforms, index, bucket) for index, bucket in enumerate(buckets)}
    )


def write_bucket(transforms: list[Any], index: int, bucket: Any) -> list[Any]:
    """Writes one file and syncs it to the disk."""
    answers: queue.Queue[Any] = queue.Queue()
    pending: queue.Queue[int] = queue.Queue()
    pending.put(index)
    FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, answers, pending, True)
    _, written = answers.get_nowait()
    if isinstance(written, Exception):
        raise CheckpointError(f"{bucket[0]} can't be written: {written!r}") from written
    return list(written)
