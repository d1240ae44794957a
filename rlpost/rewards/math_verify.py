"""Mathematical equality of answers [github.com/huggingface/Math-Verify]."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from pydantic import PositiveInt

from rlpost.errors import DataError
from rlpost.rewards.base import RewardInputs


@dataclass(frozen=True)
class MathVerifyRewardConfig:
    float_rounding: PositiveInt
    numeric_precision: PositiveInt


class MathVerifyReward:
    """1.0 when the response's answer (boxed, else last expression) equals `prompt.answer`."""

    Config = MathVerifyRewardConfig

    def __init__(self, config: MathVerifyRewardConfig) -> None:
        self._config = config
        self._library = importlib.import_module("math_verify")

    def score(self, inputs: RewardInputs) -> float:
        """Raises DataError when the reference answer itself can't be read as mathematics."""
        # The library's own limits use SIGALRM; the pool's per-call limit covers hangs.
        gold = self._library.parse(f"${inputs.prompt.answer}$", parsing_timeout=None)
        if not gold:
            raise DataError(
                f"prompt {inputs.prompt.prompt_id!r}: reference answer {inputs.prompt.answer!r} "
                "can't be read as mathematics; use reward=exact_match for such data"
            )
        answer = self._library.parse(inputs.response, parsing_timeout=None)
        equal = self._library.verify(
            gold,
            answer,
            float_rounding=self._config.float_rounding,
            numeric_precision=self._config.numeric_precision,
            timeout_seconds=None,
        )
        return float(equal)
