"""Rows of a batch -> packed micro-batches without padding. Pure numpy.

Letters: S sequences of a micro-batch, T tokens laid end to end, M loss tokens.

Only the hidden states that predict a loss token go through the language-model head. A token at
flat position t is predicted by position t - 1, so `hidden_rows_M = position of the token - 1`:
the first response token is predicted by the last prompt token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlpost.errors import TrainerError
from rlpost.types import Array

Row = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One micro-batch; equal to itself alone, so that it may be a key.

    Example: prompts of 2 and 1 tokens, responses [7, 8] and [9].

    token_ids_T   = [5, 6, 7, 8, 5, 9]    cu_seqlens = [0, 4, 6]
    loss_rows_M   = [2, 3, 5]             hidden_rows_M = [1, 2, 4]
    targets_M     = [7, 8, 9]             sequence_M = [0, 0, 1]    lengths_S = [2, 1]
    """

    sample_ids: tuple[str, ...]  # [S]
    token_ids_T: Array  # int64
    lengths: tuple[int, ...]  # tokens of each sequence, a filling one without a sample last
    loss_rows_M: Array  # int64, flat positions of the loss tokens
    targets_M: Array  # int64
    sequence_M: Array  # int64, ascending
    lengths_S: Array  # int64, loss tokens of each sequence
    columns: Mapping[str, Array]  # at the loss tokens, [M] or [M, K]: float32, ids int64

    @property
    def hidden_rows_M(self) -> Array:
        return self.loss_rows_M - 1

    @property
    def num_loss_tokens(self) -> int:
        return len(self.targets_M)


def pack(
    sample_ids: Sequence[str], rows: Sequence[Row], *, columns: Sequence[str], multiple: int
) -> PackedBatch:
    """Packs whole rows, which hold token_ids, loss_mask and `columns`, all [L].

    The number of tokens is filled up to a multiple of `multiple` with a sequence without loss
    (sequence parallelism cuts the tokens evenly). Raises TrainerError for a row with no tokens or
    with a loss on its first token, which nothing predicts.
    """
    for name, row in zip(sample_ids, rows, strict=True):
        _check(name, row)
    lengths = np.array([len(row["token_ids"]) for row in rows], dtype=np.int64)
    masks = [np.flatnonzero(row["loss_mask"]) for row in rows]
    starts = np.cumsum(lengths) - lengths
    lengths_S = np.array([len(mask) for mask in masks], dtype=np.int64)
    token_ids_T = _join([row["token_ids"] for row in rows], np.int64)
    loss_rows_M = _join([mask + start for mask, start in zip(masks, starts, strict=True)], np.int64)
    fill = -len(token_ids_T) % multiple
    return PackedBatch(
        sample_ids=tuple(sample_ids),
        token_ids_T=np.append(token_ids_T, np.zeros(fill, np.int64)),
        lengths=(*lengths.tolist(), *([fill] if fill else [])),
        loss_rows_M=loss_rows_M,
        targets_M=token_ids_T[loss_rows_M],
        sequence_M=np.repeat(np.arange(len(rows)), lengths_S),
        lengths_S=lengths_S,
        columns={
            name: _column([row[name][mask] for row, mask in zip(rows, masks, strict=True)])
            for name in columns
        },
    )


def dummy(*, multiple: int) -> PackedBatch:
    """A micro-batch without loss, for a rank that has no rows but must join the collectives."""
    row = {"token_ids": np.zeros(1, np.int64), "loss_mask": np.zeros(1, np.int64)}
    return pack(("",), [row], columns=(), multiple=multiple)


def unpack(batch: PackedBatch, values_M: Array) -> tuple[Array, Array]:
    """(values [T of the samples], lengths [S]): a per-token column from [M] or [M, K].

    Off the loss tokens numbers are NaN, and ids -1.
    """
    lengths = np.array(batch.lengths[: len(batch.sample_ids)], dtype=np.int64)
    shape = (int(lengths.sum()), *values_M.shape[1:])
    is_ids = np.issubdtype(values_M.dtype, np.integer)
    column: Array = np.full(shape, -1, np.int32) if is_ids else np.full(shape, np.nan, np.float32)
    column[batch.loss_rows_M] = values_M
    return column, lengths


def _check(name: str, row: Row) -> None:
    if len(row["token_ids"]) == 0:
        raise TrainerError(f"sample {name!r} has no tokens; it must not enter a batch")
    if row["loss_mask"][0]:
        raise TrainerError(
            f"loss_mask of sample {name!r} is 1 at token 0, which no token precedes; "
            "a prompt needs at least one token"
        )


def _column(parts: Sequence[Array]) -> Array:
    is_ids = bool(parts) and np.issubdtype(parts[0].dtype, np.integer)
    return _join(parts, np.int64 if is_ids else np.float32)


def _join(parts: Sequence[Array], dtype: type) -> Array:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
