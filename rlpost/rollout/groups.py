"""From the answers to a prompt to its group: scored, stored, and known by a handle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.cluster import store
from rlpost.rewards.budget import FailureBudget
from rlpost.rollout.base import Rollout, Strategy, Tokenizer
from rlpost.rollout.blocks import (
    GroupText,
    failed_handle,
    make_block,
    make_handle,
    with_teacher_prompt,
)
from rlpost.rollout.encoding import decode_response
from rlpost.rollout.opening import Pending
from rlpost.rollout.requests import group_failure, unanswered
from rlpost.rollout.scoring import Scoring
from rlpost.types import Generation, GroupHandle


@dataclass(frozen=True)
class GroupMaker:
    """`budget` counts groups whose answers can't be used; it raises BudgetError when it is spent.

    A group that fails is stored, too: its prompt and what was answered go into the samples file.
    """

    strategy: Strategy
    scoring: Scoring
    tokenizer: Tokenizer
    budget: FailureBudget

    async def scored(self, pending: Pending, generations: Sequence[Generation]) -> GroupHandle:
        """The group of these answers. Raises BudgetError when rewards or answers fail too often,
        DataError for a prompt that the strategy can't use."""
        generate_s = time.monotonic() - pending.started
        rollouts = self.strategy.rollouts(
            pending.prompt,
            pending.prompt_ids,
            generations,
            tokenizer=self.tokenizer,
            policy_version=pending.policy_version,
        )
        if failure := group_failure(rollouts):
            self.budget.failed(f"prompt {pending.prompt.key!r}: {failure}")
            return await self._stored_failure(pending, rollouts, failure, generate_s)
        self.budget.succeeded()
        return await self._stored_group(pending, rollouts, generate_s)

    async def failed(self, pending: Pending, failure: str) -> GroupHandle:
        """A group without answers."""
        generate_s = time.monotonic() - pending.started if pending.ticket else 0.0
        rollouts = [unanswered(pending.prompt_ids)]
        return await self._stored_failure(pending, rollouts, failure, generate_s)

    async def _stored_group(
        self, pending: Pending, rollouts: Sequence[Rollout], generate_s: float
    ) -> GroupHandle:
        started = time.monotonic()
        text = self._text(pending, rollouts)
        # An evaluation has no use for scores of steps.
        scores, steps = await self.scoring.score(
            pending.prompt, rollouts, text.responses, with_steps=pending.record == "train"
        )
        block = make_block(pending.prompt, rollouts, scores, text, steps)
        if pending.teacher_prompt_ids is not None:
            block = with_teacher_prompt(block, pending.teacher_prompt_ids)
        return make_handle(
            pending.prompt.key,
            block,
            await asyncio.to_thread(store.put, block),
            generate_s=generate_s,
            reward_s=time.monotonic() - started,
            teacher=pending.teacher,
        )

    async def _stored_failure(
        self, pending: Pending, rollouts: Sequence[Rollout], failure: str, generate_s: float
    ) -> GroupHandle:
        block = make_block(pending.prompt, rollouts, [], self._text(pending, rollouts))
        ref = await asyncio.to_thread(store.put, block)
        return failed_handle(pending.prompt, failure, ref=ref, generate_s=generate_s)

    def _text(self, pending: Pending, rollouts: Sequence[Rollout]) -> GroupText:
        return GroupText(
            prompt=str(self.tokenizer.decode(pending.prompt_ids)),
            responses=tuple(
                decode_response(self.tokenizer, rollout.response_ids) for rollout in rollouts
            ),
        )
