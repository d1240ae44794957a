"""Equality of text."""

from __future__ import annotations

from dataclasses import dataclass

from rlpost.errors import DataError
from rlpost.rewards.base import RewardInputs
from rlpost.rewards.extract import Pattern, last_match, require_answer_pattern


@dataclass(frozen=True)
class ExactMatchConfig:
    answer_pattern: Pattern
    ignore_case: bool

    def __post_init__(self) -> None:
        require_answer_pattern("answer_pattern", self.answer_pattern)


class ExactMatch:
    """1.0 when the answer picked by `answer_pattern` is `prompt.answer`, else 0.0."""

    Config = ExactMatchConfig

    def __init__(self, config: ExactMatchConfig) -> None:
        self._config = config

    def score(self, inputs: RewardInputs) -> float:
        """Raises DataError for a prompt without a reference answer."""
        gold = inputs.prompt.answer.strip()
        if not gold:
            raise DataError(
                f"prompt {inputs.prompt.prompt_id!r} has no answer to match; set data.answer_key"
            )
        answer = last_match(self._config.answer_pattern, inputs.response)
        if answer is None:
            return 0.0
        if self._config.ignore_case:
            return float(answer.casefold() == gold.casefold())
        return float(answer == gold)
