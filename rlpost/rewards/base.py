"""The contract of a reward: one prompt, one response, one number.

A reward is plain synchronous code that may be slow or hang: it runs in a pool process, under a
per-call limit. It raises on trouble; the pool turns that into a Verdict of status "error".
Every implementation passes tests/contract/test_reward.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlpost.types import FinishReason, Prompt


@dataclass(frozen=True, slots=True)
class RewardInputs:
    """What a reward may look at. `response` is decoded without special tokens."""

    prompt: Prompt
    response: str
    finish_reason: FinishReason
    num_response_tokens: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a program that scores steps may look at; `steps` are texts, separators included."""

    prompt: Prompt
    steps: tuple[str, ...]


class Reward(Protocol):
    """A reward function. `score` returns a finite float; higher is better."""

    def score(self, inputs: RewardInputs) -> float: ...
