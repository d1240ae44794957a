"""From scored groups to what each role receives. Pure: no workers, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rlpost.data.balance import balanced_split
from rlpost.loops.passes import Pass
from rlpost.prm.credit import CreditConfig, step_advantages
from rlpost.types import BatchScalars, BatchView, GroupHandle, StoredBlock

SAME_REWARD = 1e-9  # rewards are weighted sums, so equal ones may differ by rounding


@dataclass(frozen=True)
class Batch:
    """One training batch on the driver: handles only. `dropped` pairs a group with the reason.

    `blocks` starts as the groups' own; passes that are `done` have added theirs. `generate_s` is
    the time until the last answer was there, `reward_s` what scoring added to it.
    """

    step: int
    groups: tuple[GroupHandle, ...]
    dropped: tuple[tuple[GroupHandle, str], ...]
    generate_s: float
    reward_s: float
    blocks: tuple[StoredBlock, ...] = ()
    done: frozenset[Pass] = frozenset()

    @classmethod
    def of(
        cls,
        step: int,
        groups: Sequence[GroupHandle],
        dropped: Sequence[tuple[GroupHandle, str]],
        *,
        generate_s: float,
        reward_s: float,
    ) -> Batch:
        blocks = tuple(StoredBlock(group.block, group.sample_ids) for group in groups)
        return cls(step, tuple(groups), tuple(dropped), generate_s, reward_s, blocks)

    def routed_to(self, teacher: str) -> Batch:
        """The groups that `teacher` scores."""
        return replace(self, groups=tuple(g for g in self.groups if g.teacher == teacher))

    def with_blocks(self, blocks: Iterable[StoredBlock | None], done: Iterable[Pass] = ()) -> Batch:
        added = tuple(block for block in blocks if block is not None)
        return replace(self, blocks=self.blocks + added, done=self.done.union(done))


def scalars_of(
    groups: Sequence[GroupHandle], *, credit: CreditConfig | None = None
) -> BatchScalars:
    """Flattens the groups' scalars, sample by sample, in group order.

    `credit` says how scores of steps become advantages, which needs whole groups.
    """
    step_rewards = tuple(steps for group in groups for steps in group.step_rewards)
    group_ids = tuple(group.prompt_key for group in groups for _ in group.sample_ids)
    return BatchScalars(
        sample_ids=tuple(name for group in groups for name in group.sample_ids),
        group_ids=group_ids,
        rewards=tuple(reward for group in groups for reward in group.rewards),
        lengths=tuple(length for group in groups for length in group.lengths),
        loss_tokens=tuple(tokens for group in groups for tokens in group.loss_tokens),
        step_rewards=step_rewards,
        step_advantages=step_advantages(credit, step_rewards, group_ids) if credit else (),
    )


def view_for(
    batch: Batch,
    *,
    data_parallel_size: int,
    num_minibatches: int,
    num_visits: int = 1,
    credit: CreditConfig | None = None,
) -> BatchView:
    """The batch as one role takes it: rows spread over its ranks, balanced by tokens.

    A minibatch holds whole groups, in batch order, so that the optimizer steps of a batch do not
    depend on how many ranks there are. With `num_visits` the minibatches come round again.
    """
    per_minibatch = math.ceil(len(batch.groups) / num_minibatches)
    chunks = [
        batch.groups[start : start + per_minibatch]
        for start in range(0, len(batch.groups), per_minibatch)
    ]
    return BatchView(
        step=batch.step,
        blocks=batch.blocks,
        scalars=scalars_of(batch.groups, credit=credit),
        minibatches=tuple(_spread(chunk, data_parallel_size) for chunk in chunks) * num_visits,
    )


def _spread(groups: Sequence[GroupHandle], num_ranks: int) -> tuple[tuple[str, ...], ...]:
    scalars = scalars_of(groups)
    shares = balanced_split(scalars.lengths, num_ranks)
    return tuple(tuple(scalars.sample_ids[row] for row in share) for share in shares)


def drop_reason(group: GroupHandle, *, scored: bool, drop_constant: bool) -> str:
    """Why a group can't or shouldn't be trained; "" if it is fine.

    `scored` says whether the run has rewards at all. `drop_constant` is DAPO's dynamic sampling
    [arXiv:2503.14476, eq. 11]: a group whose rewards are all equal has no gradient. A group of one
    is not constant, it is single.
    """
    if group.failure or not scored:
        return group.failure
    known = [reward for reward in group.rewards if not math.isnan(reward)]
    if not known:
        return "no_reward"
    if drop_constant and len(group.rewards) > 1 and max(known) - min(known) < SAME_REWARD:
        return "constant_reward"
    return ""
