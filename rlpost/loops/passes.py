"""The plan of passes: what is computed on a batch before it is trained, by whom, in which order.

A pass adds columns to the batch. All passes whose columns are there start together, so those of
different roles run side by side. Adding a pass is adding one `Pass`. Pure: no workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlpost.errors import ConfigError, TrainerError
from rlpost.types import BatchView, PassResult


@dataclass(frozen=True, slots=True)
class Pass:
    """`method(view, name)` of the ranks of `role` makes column `name` from columns `needs`.

    Without `needs` it reads the rollouts alone, so it may start before the actor is free. Several
    passes of one name, each of another `teacher`, make the column for the groups routed to them.
    """

    name: str
    role: str
    method: str
    needs: tuple[str, ...] = ()
    teacher: str | None = None  # None: all groups


KNOWN = {
    item.name: item
    for item in (
        Pass("old_logprobs", "actor", "compute_logprobs"),
        Pass("ref_logprobs", "reference", "compute_logprobs"),
        Pass("values", "critic", "compute_values"),
    )
}


def teacher_passes(teachers: Iterable[str], needs: tuple[str, ...]) -> tuple[Pass, ...]:
    """One pass for each teacher with ranks of its own."""
    return tuple(
        Pass("teacher_logprobs", f"teacher.{name}", "compute_teacher", needs, teacher=name)
        for name in teachers
    )


def plan_passes(names: Iterable[str], extra: Sequence[Pass] = ()) -> tuple[Pass, ...]:
    """The passes called `names`, each after those it needs; `extra` are those not in KNOWN.

    Raises ConfigError for an unknown one.
    """
    given = {item.name for item in extra}
    wanted = [name for name in dict.fromkeys(names) if name not in given]
    unknown = [name for name in wanted if name not in KNOWN]
    if unknown:
        raise ConfigError([f"unknown pass {name!r}; known: {', '.join(KNOWN)}" for name in unknown])
    passes = [*(KNOWN[name] for name in wanted), *extra]
    return tuple(item for ready in rounds(passes) for item in ready)


def early(passes: Sequence[Pass], trained: Container[str]) -> list[Pass]:
    """Those that may run while the actor trains on the batch before: frozen roles, no needs."""
    return [item for item in passes if not item.needs and item.role not in trained]


def rounds(passes: Sequence[Pass], done: Container[Pass] = ()) -> Iterator[list[Pass]]:
    """The passes that are left, side by side where they can be, round after round.

    Raises ConfigError.
    """
    left = [item for item in passes if item not in done]
    made = {item.name for item in passes} - {item.name for item in left}
    while left:
        ready = [item for item in left if made.issuperset(item.needs)]
        if not ready:
            names = ", ".join(item.name for item in left)
            raise ConfigError([f"passes {names} wait for columns that no pass makes"])
        yield ready
        left = [item for item in left if item not in ready]
        made = {item.name for item in passes} - {item.name for item in left}


def check_delivered(item: Pass, results: Sequence[PassResult], view: BatchView) -> None:
    """Every row of the view came back exactly once. Raises TrainerError naming role and samples."""
    wanted = Counter({name for shares in view.minibatches for share in shares for name in share})
    got = Counter(name for part in results if part.block for name in part.block.sample_ids)
    for what, names in (("missing", wanted - got), ("not asked for, or twice", got - wanted)):
        if names:
            rows = sorted(names)
            raise TrainerError(
                f"pass {item.name} of {item.role}: {len(rows)} samples {what} "
                f"({', '.join(rows[:3])}){_owners(rows, view)}{_senders(item, rows, results)}"
            )


def _senders(item: Pass, names: Sequence[str], results: Sequence[PassResult]) -> str:
    """Which ranks delivered any of these samples."""
    ranks = [
        f"{item.role}[{rank}]"
        for rank, part in enumerate(results)
        if part.block is not None and not set(names).isdisjoint(part.block.sample_ids)
    ]
    return f"; delivered by {', '.join(ranks)}" if ranks else ""


def _owners(names: Sequence[str], view: BatchView) -> str:
    """Which data-parallel ranks were to deliver these samples."""
    wanted = set(names)
    ranks = sorted(
        {
            rank
            for shares in view.minibatches
            for rank, share in enumerate(shares)
            if not wanted.isdisjoint(share)
        }
    )
    return f"; of data-parallel rank {', '.join(map(str, ranks))}" if ranks else ""
