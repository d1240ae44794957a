"""The contract of a step scorer: one response cut into steps, one number for each.

Letters: L tokens of a rollout, S steps of it.
A step that can't be judged is missing, NaN, never 0.
Every scorer passes tests/contract/test_prm.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlpost.rewards.base import StepInputs
from rlpost.types import Array, GenerateRequest, Generation

Generate = Callable[[Sequence[GenerateRequest]], Awaitable[Sequence[Generation]]]
Classify = Callable[[Sequence[int]], Awaitable[Array]]


@dataclass(frozen=True)
class Response:
    """What a scorer may look at. `sample` names it in messages and seeds; `ends` are positions.

    Response("p/0@0#1", inputs=StepInputs(prompt, ("7+5=12\\n", "12")),
             token_ids=(...), ends=(10, 13))
    """

    sample: str
    inputs: StepInputs
    token_ids: tuple[int, ...]  # [L], prompt included
    ends: tuple[int, ...]  # [S], position of each step's last token


@dataclass(frozen=True)
class Services:
    """What the rollout worker lends a scorer.

    `generate` asks engines for text, `classify` gives a token classifier's raw outputs [L, labels];
    both raise EngineError. `seed_of(sample, step, vote)` seeds a request by its identity alone.
    """

    tokenizer: Any  # the policy's
    scorer_tokenizer: Any  # of the model that scores; the policy's where that one does
    generate: Generate
    classify: Classify
    seed_of: Callable[[str, int, int], int]


class StepScorer(Protocol):
    """Built as `Scorer(config, services=Services(...))` inside the rollout worker."""

    async def start(self) -> None:
        """Raises ConfigError for parts that don't fit, BudgetError for a verifier that fails."""

    async def score(self, response: Response) -> list[float]:
        """[S], NaN where missing. Raises BudgetError when scoring fails too often."""

    async def close(self) -> None: ...


class StepProgram(Protocol):
    """A program that scores steps, run in the reward processes like a reward.

    `gives_values`: a score is the chance that the answer will be right, seen after that step
    (credit `progress` takes differences of those), not a verdict on the step alone.
    """

    gives_values: bool

    def score_steps(self, inputs: StepInputs) -> Sequence[float | None]:
        """One score for each step; None where the program can't tell."""
