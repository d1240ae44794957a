"""One prompt, one answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rlpost.rollout.base import NO_VERSION, Attempts, Rollout, Tokenizer
from rlpost.types import Generation, Prompt, Sampling


@dataclass(frozen=True)
class SingleTurnConfig:
    """`generate_deadline_s` bounds a group with all its attempts and its scoring, the other one an
    attempt. `max_consecutive_failures` counts groups."""

    temperature: PositiveFloat
    top_p: Annotated[float, Field(gt=0, le=1)]
    max_prompt_tokens: PositiveInt
    max_response_tokens: PositiveInt
    generate_deadline_s: PositiveFloat
    attempt_deadline_s: PositiveFloat
    max_attempts: PositiveInt
    max_consecutive_failures: NonNegativeInt

    def __post_init__(self) -> None:
        if self.attempt_deadline_s * self.max_attempts > self.generate_deadline_s:
            raise ValueError(
                f"generate_deadline_s ({self.generate_deadline_s:g}) must leave room for "
                f"max_attempts ({self.max_attempts}) of attempt_deadline_s "
                f"({self.attempt_deadline_s:g}) each; raise it to "
                f"{self.attempt_deadline_s * self.max_attempts:g} or more"
            )

    def conflicts(self, run: Any) -> Iterator[str]:
        """`run` is the whole RunConfig."""
        algorithm = run.algorithm.target(run.algorithm.config)
        if self.top_p < 1 and "old_logprobs" in algorithm.passes:
            yield (
                f"rollout.top_p ({self.top_p:g}): the engine would sample from the nucleus alone, "
                "while the trainer's log-probs are over the whole vocabulary, so every ratio would "
                "be wrong; set rollout.top_p=1.0 (eval.top_p is free)"
            )


class SingleTurn:
    """The response is what the engine sampled after the prompt, stop token included."""

    Config = SingleTurnConfig

    def __init__(self, config: SingleTurnConfig) -> None:
        self._config = config

    @property
    def attempts(self) -> Attempts:
        config = self._config
        return Attempts(
            deadline_s=config.attempt_deadline_s,
            max_attempts=config.max_attempts,
            max_consecutive_failures=config.max_consecutive_failures,
            deadline_key="rollout.attempt_deadline_s",
        )

    def sampling(self, group_size: int) -> Sampling:
        config = self._config
        return Sampling(config.temperature, config.top_p, config.max_response_tokens)

    def rollouts(
        self,
        prompt: Prompt,
        prompt_ids: Sequence[int],
        generations: Sequence[Generation],
        *,
        tokenizer: Tokenizer,
        policy_version: int,
    ) -> list[Rollout]:
        return [one_turn(prompt_ids, generation) for generation in generations]


def one_turn(prompt_ids: Sequence[int], generation: Generation) -> Rollout:
    """Prompt and generation end to end; the loss is on every generated token."""
    length, size = len(prompt_ids), len(generation.token_ids)
    return Rollout(
        token_ids=np.concatenate([prompt_ids, generation.token_ids]).astype(np.int32),
        loss_mask=np.arange(length + size) >= length,
        logprobs=np.concatenate([np.full(length, np.nan), generation.logprobs]).astype(np.float32),
        policy_versions=np.concatenate(
            [np.full(length, NO_VERSION), generation.policy_versions]
        ).astype(np.int32),
        prompt_length=length,
        finish_reason=generation.finish_reason,
    )
