"""From a batch view to this rank's packed micro-batches, and new columns back into the store."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rlpost.data.balance import budget_split
from rlpost.data.joining import join_blocks
from rlpost.errors import TrainerError
from rlpost.trainers.base import split_rows
from rlpost.trainers.megatron.packing import PackedBatch, Row, pack, unpack
from rlpost.types import Array, BatchView, SampleBlock, StoredBlock


def read_rows(
    view: BatchView, *, data_rank: int, columns: Sequence[str], deadline_s: float
) -> dict[str, Row]:
    """This rank's rows by sample id, joined from all blocks.

    Raises TrainerError naming the column and the samples when one is missing or inconsistent.
    """
    from rlpost.cluster import store

    names = list(dict.fromkeys(name for share in split_rows(view, data_rank) for name in share))
    mine = set(names)
    refs = [block.ref for block in view.blocks if not mine.isdisjoint(block.sample_ids)]
    try:
        rows = join_blocks(store.fetch_all(refs, deadline_s), names, columns)
    except ValueError as error:
        raise TrainerError(f"batch of step {view.step}: {error}") from error
    return dict(zip(names, rows, strict=True))


def check_view(view: BatchView, *, data_size: int) -> None:
    """Raises TrainerError when shares and ranks don't match, or scalars are missing."""
    known = set(view.scalars.sample_ids)
    for index, shares in enumerate(view.minibatches):
        where = f"minibatch {index} of step {view.step}"
        if len(shares) != data_size:
            raise TrainerError(
                f"{where} has {len(shares)} shares for {data_size} data-parallel ranks; split "
                "batches by the data_parallel_size of the role they go to"
            )
        unknown = [name for share in shares for name in share if name not in known]
        if unknown:
            raise TrainerError(f"{where}: samples without scalars: {', '.join(unknown[:3])}")


def loss_tokens_of(view: BatchView, outcome: Mapping[str, float]) -> dict[str, int]:
    """Sample id -> loss tokens, of the samples that are trained: an outcome of NaN is missing."""
    counts = dict(zip(view.scalars.sample_ids, view.scalars.loss_tokens, strict=True))
    return {name: count for name, count in counts.items() if not math.isnan(outcome[name])}


def micro_batches(
    names: Sequence[str],
    rows: dict[str, Row],
    *,
    columns: Sequence[str],
    budget: int,
    multiple: int,
) -> list[PackedBatch]:
    """Whole samples in the fewest balanced micro-batches of at most `budget` tokens."""
    lengths = [len(rows[name]["token_ids"]) for name in names]
    parts = [[names[index] for index in part] for part in budget_split(lengths, budget)]
    return [
        pack(part, [rows[name] for name in part], columns=columns, multiple=multiple)
        for part in parts
    ]


def store_column(
    batches: Sequence[PackedBatch], values: Sequence[Array], column: str
) -> StoredBlock | None:
    """Puts a per-token column of the batches' samples into the store: `values` [M] of each batch
    at its loss tokens, NaN elsewhere. None without batches."""
    return store_columns(batches, [{column: filled} for filled in values])


def store_columns(
    batches: Sequence[PackedBatch], values: Sequence[Mapping[str, Array]]
) -> StoredBlock | None:
    """As store_column for several columns, which lie in the same block."""
    from rlpost.cluster import store

    if not batches:
        return None
    names = tuple(name for batch in batches for name in batch.sample_ids)
    lengths = [length for batch in batches for length in batch.lengths[: len(batch.sample_ids)]]
    tokens = {
        column: np.concatenate(
            [unpack(batch, part[column])[0] for batch, part in zip(batches, values, strict=True)]
        )
        for column in values[0]
    }
    block = SampleBlock(names, np.array(lengths, dtype=np.int64), tokens)
    return StoredBlock(store.put(block), names)


def check_loss_tokens(batches: Sequence[PackedBatch], loss_tokens: dict[str, int]) -> None:
    """The normalisation uses the driver's counts; they must be those of the masks."""
    for batch in batches:
        for name, count in zip(batch.sample_ids, batch.lengths_S.tolist(), strict=True):
            if count != loss_tokens[name]:
                raise TrainerError(
                    f"sample {name!r} has {count} tokens with loss_mask 1, but its scalars say "
                    f"{loss_tokens[name]}; both must come from the same rollout"
                )
