"""From prompts to batches: draws until a batch is full, replacing what can't be trained."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost.loops.batches import Batch, drop_reason
from rlpost.loops.draws import book, check_draw_budget, draw_prompts
from rlpost.types import GroupHandle

if TYPE_CHECKING:
    from rlpost.data.ledger import Ledger
    from rlpost.loops.rollouts import Rollouts


@dataclass(frozen=True)
class Intake:
    """`scored` says whether the run has rewards at all; `drop_constant` asks for dynamic sampling
    (see batches.drop_reason)."""

    ledger: Ledger
    rollouts: Rollouts
    prompts_per_step: int
    scored: bool
    drop_constant: bool

    async def batch(self, step: int, *, policy_version: int, max_draw_factor: float) -> Batch:
        """The batch of `step`, generated under `policy_version`.

        Raises BudgetError when more than `max_draw_factor` times the prompts it needs were drawn,
        DataError when the data has ended.
        """
        kept: list[GroupHandle] = []
        dropped: list[tuple[GroupHandle, str]] = []
        generate_s = 0.0
        started = time.monotonic()
        while len(kept) < self.prompts_per_step:
            check_draw_budget(step, self.prompts_per_step, len(kept), dropped, max_draw_factor)
            groups = await self._round(self.prompts_per_step - len(kept), policy_version)
            generate_s += max(group.generate_s for group in groups)
            for group in groups:
                if reason := self.settle(group):
                    dropped.append((group, reason))
                else:
                    kept.append(group)
        # Scoring runs beside generation; what counts is the time it adds after the last answer.
        reward_s = max(0.0, time.monotonic() - started - generate_s)
        return Batch.of(step, kept, dropped, generate_s=generate_s, reward_s=reward_s)

    async def _round(self, count: int, policy_version: int) -> list[GroupHandle]:
        prompts = draw_prompts(self.ledger, count)
        return await self.rollouts.generate(prompts, policy_version=policy_version)

    def settle(self, group: GroupHandle) -> str:
        """Books a finished group; returns why it is dropped, or "" when it can be trained."""
        reason = drop_reason(group, scored=self.scored, drop_constant=self.drop_constant)
        book(self.ledger, group, reason)
        return reason
