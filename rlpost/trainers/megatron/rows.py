"""From a batch view to this rank's packed micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from rlpost.data.balance import budget_split
from rlpost.errors import TrainerError
from rlpost.trainers.base import split_rows
from rlpost.trainers.megatron.packing import PackedBatch, Row, pack
from rlpost.types import BatchView, join_blocks


def read_rows(
    view: BatchView, *, data_rank: int, columns: Sequence[str], deadline_s: float
) -> dict[str, Row]:
    """This rank's rows by sample id, joined from all blocks.

    Raises TrainerError naming the column and the samples when one is missing or inconsistent.
    """
    from rlpost.cluster import store

    names = [name for share in split_rows(view, data_rank) for name in share]
    try:
        rows = join_blocks(store.fetch_all(view.blocks, deadline_s), names, columns)
    except ValueError as error:
        raise TrainerError(f"batch of step {view.step}: {error}") from error
    return dict(zip(names, rows, strict=True))


def check_view(view: BatchView, *, data_size: int) -> None:
    """Raises TrainerError: ranks without a share, or no loss tokens, can't make a step."""
    loss_tokens = dict(zip(view.scalars.sample_ids, view.scalars.loss_tokens, strict=True))
    for index, shares in enumerate(view.minibatches):
        where = f"minibatch {index} of step {view.step}"
        if len(shares) != data_size:
            raise TrainerError(
                f"{where} has {len(shares)} shares for {data_size} data-parallel ranks; split "
                "batches by the data_parallel_size of the role they go to"
            )
        unknown = [name for share in shares for name in share if name not in loss_tokens]
        if unknown:
            raise TrainerError(f"{where}: samples without scalars: {', '.join(unknown[:3])}")
        if not any(loss_tokens[name] for share in shares for name in share):
            raise TrainerError(f"{where} has no token with loss_mask 1; drop it before training")


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


def check_loss_tokens(batches: Sequence[PackedBatch], loss_tokens: dict[str, int]) -> None:
    """The normalisation uses the driver's counts; they must be those of the masks."""
    for batch in batches:
        for name, count in zip(batch.sample_ids, batch.lengths_S.tolist(), strict=True):
            if count != loss_tokens[name]:
                raise TrainerError(
                    f"sample {name!r} has {count} tokens with loss_mask 1, but its scalars say "
                    f"{loss_tokens[name]}; both must come from the same rollout"
                )
