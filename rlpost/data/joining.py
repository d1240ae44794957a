"""Rows of samples out of blocks that different ranks have made. Pure numpy.

A row is joined by its sample id, never by position or rank: a rank that delivers nothing, or more
than it was asked for, can't shift the others' columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rlpost.types import Array, SampleBlock

Row = dict[str, Array]  # column -> [L], or a scalar


def join_blocks(
    blocks: Sequence[SampleBlock], sample_ids: Sequence[str], columns: Sequence[str]
) -> list[Row]:
    """Rows of `sample_ids`, in that order, with `columns` gathered from any of the blocks.

    Raises ValueError naming the column and the first samples when one is missing, or given twice
    by different blocks, or of the wrong length.
    """
    found: dict[str, Row] = {name: {} for name in sample_ids}
    for name, column, values in _delivered(blocks, columns):
        if name not in found:
            continue
        if column in found[name]:
            raise ValueError(f"column {column!r} of sample {name!r} was delivered twice")
        found[name][column] = values
    _require_all(found, columns)
    _require_equal_lengths(found)
    return [found[name] for name in sample_ids]


def _delivered(
    blocks: Sequence[SampleBlock], columns: Sequence[str]
) -> Iterator[tuple[str, str, Array]]:
    """(sample id, column, values) of all that the blocks hold of these columns."""
    for block in blocks:
        for name, row in block.rows():
            yield from ((name, column, row[column]) for column in columns if column in row)


def _require_all(found: Mapping[str, Row], columns: Sequence[str]) -> None:
    for column in columns:
        missing = [name for name, row in found.items() if column not in row]
        if missing:
            raise ValueError(
                f"column {column!r} is missing for {len(missing)} of {len(found)} samples, "
                f"first: {', '.join(missing[:3])}"
            )


def _require_equal_lengths(found: Mapping[str, Row]) -> None:
    for name, row in found.items():
        lengths = {column: len(values) for column, values in row.items() if np.ndim(values) > 0}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of sample {name!r} have unequal lengths: {lengths}")
