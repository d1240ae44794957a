"""From a prompt to the requests that engines get, and to what its teacher reads."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rlpost.distillation.context import TeacherContext
from rlpost.rollout.base import RolloutConfig, Tokenizer
from rlpost.rollout.encoding import encode_prompt
from rlpost.rollout.engine_pool import Ticket
from rlpost.rollout.requests import Record, group_requests
from rlpost.types import Prompt, Sampling


@dataclass(eq=False)
class Pending:
    """A prompt between begin and finish. `ticket` is None when no engine is asked."""

    prompt: Prompt
    prompt_ids: list[int]
    ticket: Ticket | None
    policy_version: int
    started: float
    record: Record
    failure: str = ""
    teacher: str = ""
    teacher_prompt_ids: list[int] | None = None  # None: the teacher reads prompt_ids

    @property
    def key(self) -> str:
        """What it is finished by. A prompt may be evaluated while it is in flight for training."""
        return pending_key(self.record, self.prompt)


def pending_key(record: Record, prompt: Prompt) -> str:
    return f"{record}:{prompt.key}"


@dataclass(frozen=True)
class Opener:
    """`sampling` is the strategy's own, None where no engine is asked."""

    config: RolloutConfig
    sampling: Sampling | None
    tokenizer: Tokenizer
    teacher: TeacherContext | None
    seed: int

    def open(
        self,
        prompt: Prompt,
        group_size: int,
        sampling: Sampling | None,
        *,
        record: Record,
        policy_version: int,
    ) -> Pending:
        """A prompt that is too long fails, and asks nobody. Raises DataError for a prompt that
        can't be encoded, or has no teacher."""
        ids = encode_prompt(self.tokenizer, prompt)
        pending = Pending(prompt, ids, None, policy_version, time.monotonic(), record)
        if self.teacher is not None and record == "train":
            self._show_teacher(pending, self.teacher)
        if len(ids) > self.config.max_prompt_tokens:
            pending.failure = "prompt_too_long"
        if pending.failure:
            return pending
        if sampling := sampling or self.sampling:
            pending.ticket = Ticket(
                group_requests(prompt, ids, group_size, sampling, record=record, run_seed=self.seed)
            )
        return pending

    def _show_teacher(self, pending: Pending, context: TeacherContext) -> None:
        """Who scores the group, and what it reads before the response: tokenised here, once."""
        pending.teacher = context.teacher_of(pending.prompt)
        shown = context.prompt_of(pending.prompt)
        if shown is not None:
            pending.teacher_prompt_ids = encode_prompt(self.tokenizer, shown)
            size = len(pending.teacher_prompt_ids) + self.config.max_response_tokens
            if size > context.max_length:
                pending.failure = "hint_too_long"
