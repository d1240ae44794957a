"""Soft over-long penalty [DAPO, arXiv:2503.14476, eq. 13]."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import PositiveInt

from rlpost.rewards.base import RewardInputs


@dataclass(frozen=True)
class OverlongPenaltyConfig:
    max_response_tokens: PositiveInt
    buffer_tokens: PositiveInt

    def __post_init__(self) -> None:
        if self.buffer_tokens > self.max_response_tokens:
            raise ValueError(
                f"buffer_tokens ({self.buffer_tokens}) must not exceed max_response_tokens "
                f"({self.max_response_tokens}); DAPO uses a fifth of it"
            )


class OverlongPenalty:
    """0 up to `max - buffer` tokens, then falling in a line to -1 at `max`, and -1 beyond."""

    Config = OverlongPenaltyConfig

    def __init__(self, config: OverlongPenaltyConfig) -> None:
        self._config = config

    def score(self, inputs: RewardInputs) -> float:
        free = self._config.max_response_tokens - self._config.buffer_tokens
        excess = inputs.num_response_tokens - free
        return -min(max(excess / self._config.buffer_tokens, 0.0), 1.0)
