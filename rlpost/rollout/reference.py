"""The data set's worked answer as the rollout: supervised training, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from rlpost.errors import ConfigError
from rlpost.rollout.base import NO_VERSION, Rollout, Tokenizer
from rlpost.rollout.encoding import encode_completion
from rlpost.types import Generation, Prompt


@dataclass(frozen=True)
class ReferenceRolloutConfig:
    max_prompt_tokens: PositiveInt
    max_response_tokens: PositiveInt
    generate_deadline_s: PositiveFloat

    @property
    def temperature(self) -> float:
        """Nothing is sampled; log-probs are those of the plain softmax."""
        return 1.0


class ReferenceRollout:
    """Loss on the completion and its end token. Log-probs are missing: no engine sampled them."""

    Config = ReferenceRolloutConfig

    def __init__(self, config: ReferenceRolloutConfig) -> None:
        self._config = config

    @property
    def attempts(self) -> None:
        return None

    def sampling(self, group_size: int) -> None:
        if group_size != 1:
            raise ConfigError(
                [
                    f"group_size: {group_size} copies of one worked answer say no more than one; "
                    "set group_size=1 with rollout=reference"
                ]
            )

    def rollouts(
        self,
        prompt: Prompt,
        prompt_ids: Sequence[int],
        generations: Sequence[Generation],
        *,
        tokenizer: Tokenizer,
        policy_version: int,
    ) -> list[Rollout]:
        """`policy_version` labels the tokens, so that they are never stale.

        Raises DataError when the prompt has no completion.
        """
        completion = encode_completion(tokenizer, prompt)
        cut = len(completion) > self._config.max_response_tokens
        completion = completion[: self._config.max_response_tokens]
        length, size = len(prompt_ids), len(completion)
        mask = np.arange(length + size) >= length
        rollout = Rollout(
            token_ids=np.array([*prompt_ids, *completion], np.int32),
            loss_mask=mask,
            logprobs=np.full(length + size, np.nan, np.float32),
            policy_versions=np.where(mask, policy_version, NO_VERSION).astype(np.int32),
            prompt_length=length,
            finish_reason="length" if cut else "stop",
        )
        return [rollout]
