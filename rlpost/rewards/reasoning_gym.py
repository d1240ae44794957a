"""The scorer that a reasoning-gym task brings along."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlpost.errors import DataError
from rlpost.rewards.base import RewardInputs
from rlpost.rewards.extract import Pattern, last_match, require_answer_pattern


@dataclass(frozen=True)
class ReasoningGymRewardConfig:
    answer_pattern: Pattern

    def __post_init__(self) -> None:
        require_answer_pattern("answer_pattern", self.answer_pattern)


class ReasoningGymReward:
    """0..1 from the task's `score_answer`; many tasks give part marks to a nearly right form.

    Needs prompts of ReasoningGymSource: `prompt.metadata` holds `task` and `entry`.
    """

    Config = ReasoningGymRewardConfig

    def __init__(self, config: ReasoningGymRewardConfig) -> None:
        self._pattern = config.answer_pattern
        self._library = importlib.import_module("reasoning_gym")
        self._scorers: dict[str, Callable[..., float]] = {}

    def score(self, inputs: RewardInputs) -> float:
        """Raises DataError for a prompt that does not come from reasoning-gym."""
        metadata = inputs.prompt.metadata
        if "task" not in metadata or "entry" not in metadata:
            raise DataError(
                f"prompt {inputs.prompt.prompt_id!r} has no reasoning-gym entry (its metadata has "
                f"{sorted(metadata)}); use data=reasoning_gym, or reward=exact_match"
            )
        answer = last_match(self._pattern, inputs.response)
        scorer = self._scorer(str(metadata["task"]))
        return float(scorer(answer=answer, entry=metadata["entry"]))

    def _scorer(self, task: str) -> Callable[..., Any]:
        if task not in self._scorers:
            self._scorers[task] = self._library.get_score_answer_fn(task)
        return self._scorers[task]
