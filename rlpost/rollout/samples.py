"""samples/step_<n>.parquet: every sample of a step, trained or dropped, one row each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpost.cluster import store
from rlpost.types import BlockRef, GroupHandle, SampleBlock

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    from rlpost.lazy import LazyModule

    pa = LazyModule("pyarrow")
    pq = LazyModule("pyarrow.parquet")

Entry = tuple[GroupHandle, str]


def samples_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.parquet"


def write_samples(
    path: Path, step: int, entries: Sequence[Entry], blocks: Sequence[BlockRef]
) -> None:
    """Writes beside `path` and renames, so a reader never sees half a file.

    A group without a block (it failed before it had tokens) gives one row with its reason.
    """
    extra = columns_by_sample([store.fetch(ref) for ref in outside(entries, blocks)])
    rows = [row for handle, reason in entries for row in rows_of(step, handle, reason, extra)]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    pq.write_table(as_table(rows), temporary)
    os.replace(temporary, path)


def outside(entries: Sequence[Entry], blocks: Sequence[BlockRef]) -> list[BlockRef]:
    """The blocks that are not a group's own."""
    own = [handle.block for handle, _ in entries if handle.block is not None]
    return [ref for ref in blocks if ref not in own]


def columns_by_sample(blocks: Sequence[SampleBlock]) -> dict[str, dict[str, Any]]:
    """Sample id -> columns from any of the blocks."""
    found: dict[str, dict[str, Any]] = {}
    for block in blocks:
        for name, row in block.rows():
            # Top-k columns are for the trainer; in the file they would outweigh all others.
            flat = {column: value for column, value in row.items() if np.ndim(value) < 2}
            found.setdefault(name, {}).update(flat)
    return found


def rows_of(
    step: int, handle: GroupHandle, reason: str, extra: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    head = {"step": step, "prompt_key": handle.prompt_key, "reason": reason}
    if handle.teacher:
        head["teacher"] = handle.teacher
    if handle.block is None:
        yield {**head, "sample_id": None}
        return
    for name, row in store.fetch(handle.block).rows():
        yield {**head, "sample_id": name, **row, **extra.get(name, {})}


def as_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """One column per key of any row; absent values are null, missing numbers NaN."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: as_column([row.get(name) for row in rows]) for name in names})


def as_column(values: Sequence[Any]) -> pa.Array:
    """Per-token values become lists of the array's own number type."""
    first = next((value for value in values if value is not None), None)
    plain = [
        value.tolist() if isinstance(value, np.generic | np.ndarray) else value for value in values
    ]
    if isinstance(first, np.ndarray):
        return pa.array(plain, pa.list_(pa.from_numpy_dtype(first.dtype)))
    if first is None:
        return pa.array(plain, pa.string())
    return pa.array(plain)
