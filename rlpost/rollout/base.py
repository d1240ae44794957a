"""The contract of a rollout strategy: from a prompt to the rollouts of its group.

Letters: L tokens of one rollout (prompt and response), G rollouts of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlpost.errors import DeadlineError
from rlpost.types import Array, FinishReason, Generation, Prompt, Sampling

Tokenizer = Any  # a transformers tokenizer
NO_VERSION = -1  # policy_versions where loss_mask is 0


@dataclass(frozen=True, slots=True)
class Attempts:
    """How hard a group is tried on the engines."""

    deadline_s: float  # of one attempt
    max_attempts: int  # per group
    max_consecutive_failures: int  # groups that failed every attempt, before the run stops
    deadline_key: str  # where deadline_s is set, for messages

    def hint(self, error: Exception) -> str:
        """What to do about the last error of a group; a wait in the engine's queue counts too."""
        late = isinstance(error, DeadlineError)
        return f"; if it only has much to do, raise {self.deadline_key}" if late else ""


class RolloutConfig(Protocol):
    """What every strategy's Config offers to the rest of the run."""

    @property
    def temperature(self) -> float: ...
    @property
    def max_prompt_tokens(self) -> int: ...
    @property
    def max_response_tokens(self) -> int: ...
    @property
    def generate_deadline_s(self) -> float: ...


@dataclass(frozen=True)
class Rollout:
    """One answer, ready to be scored and trained on. Arrays are [L].

    Prompt [5, 6], answer [7, 2], sampled by version 4:

        Rollout(token_ids=[5, 6, 7, 2], loss_mask=[0, 0, 1, 1], logprobs=[nan, nan, -0.1, -0.3],
                policy_versions=[-1, -1, 4, 4], prompt_length=2, finish_reason="stop")
    """

    token_ids: Array  # int32
    loss_mask: Array  # bool
    logprobs: Array  # float32, NaN where no engine sampled the token
    policy_versions: Array  # int32, NO_VERSION where loss_mask is 0
    prompt_length: int
    finish_reason: FinishReason

    @property
    def response_ids(self) -> list[int]:
        return [int(token) for token in self.token_ids[self.prompt_length :]]


class Strategy(Protocol):
    """One kind of rollout; stateless."""

    @property
    def attempts(self) -> Attempts | None:
        """None if no engine is asked."""

    def sampling(self, group_size: int) -> Sampling | None:
        """How training rollouts are sampled; None if no engine is asked.

        Raises ConfigError for a group size that makes no sense here.
        """

    def rollouts(
        self,
        prompt: Prompt,
        prompt_ids: Sequence[int],
        generations: Sequence[Generation],
        *,
        tokenizer: Tokenizer,
        policy_version: int,
    ) -> list[Rollout]:
        """The group, in rollout order. `generations` [G] is empty if no engine was asked."""
