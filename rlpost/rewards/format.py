"""Whether a response has the wanted form."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlpost.rewards.base import RewardInputs
from rlpost.rewards.extract import Pattern, require_pattern


@dataclass(frozen=True)
class FormatConfig:
    pattern: Pattern

    def __post_init__(self) -> None:
        require_pattern("pattern", self.pattern)


class Format:
    """1.0 when the whole response matches `pattern` ("." also matches a newline), else 0.0."""

    Config = FormatConfig

    def __init__(self, config: FormatConfig) -> None:
        self._pattern = re.compile(config.pattern, re.DOTALL)

    def score(self, inputs: RewardInputs) -> float:
        return float(self._pattern.fullmatch(inputs.response) is not None)
