"""Steps scored by a token classifier: its output at the last token of each step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import NonNegativeInt

from rlpost.errors import ConfigError, EngineError
from rlpost.prm.base import Response, Services
from rlpost.prm.credit import CreditConfig
from rlpost.prm.limits import LimitsConfig
from rlpost.prm.steps import StepsConfig
from rlpost.types import Array
from rlpost.validation import Section


@dataclass(frozen=True)
class ModelPrmConfig:
    """`model` is served by `engine`, a pooling engine, on engines of its own."""

    credit: CreditConfig | None
    steps: StepsConfig
    model: Section
    engine: Section
    positive_label: NonNegativeInt
    limits: LimitsConfig

    def conflicts(self, run: Any) -> Iterator[str]:
        """`run` is the whole RunConfig."""
        yield from self.limits.conflicts(run)
        rollout, limit = run.rollout.config, self.model.config.max_length
        longest = rollout.max_prompt_tokens + rollout.max_response_tokens
        if longest > limit:
            yield (
                f"prm.model.max_length ({limit}) must hold rollout.max_prompt_tokens + "
                f"rollout.max_response_tokens ({longest}); raise it"
            )


class ModelPrm:
    """StepScorer. The score is the probability of `positive_label`.

    The classifier reads the policy's own token ids, so both have to have the same vocabulary. An
    engine that fails leaves all steps of the response missing, and is counted.
    """

    Config = ModelPrmConfig

    def __init__(self, config: ModelPrmConfig, *, services: Services) -> None:
        self._config = config
        self._services = services
        self._budget = config.limits.budget("prm (model)")

    async def start(self) -> None:
        """Raises ConfigError when the classifier has another vocabulary."""
        theirs = self._services.scorer_tokenizer
        if theirs.get_vocab() != self._services.tokenizer.get_vocab():
            raise ConfigError(
                [
                    "prm.model: its tokenizer has another vocabulary than the policy's, and it "
                    "would read the policy's token ids wrongly; train a prm on the policy's model "
                    "(recipe prm_train), or use prm=judge"
                ]
            )

    async def score(self, response: Response) -> list[float]:
        try:
            outputs = await self._services.classify(response.token_ids)
        except EngineError as error:
            self._budget.failed(f"{response.sample}: {error}")
            return [math.nan] * len(response.ends)
        self._budget.succeeded()
        ends = list(response.ends)
        return [float(p) for p in probability(outputs[ends], self._config.positive_label)]

    async def close(self) -> None: ...


def probability(outputs: Array, label: int) -> Array:
    """[S, labels] raw outputs -> [S] probability of `label`: softmax, or sigmoid of a single one.

    Raises ConfigError for a label that the classifier does not have.
    """
    count = outputs.shape[1]
    if label >= max(count, 2):
        raise ConfigError(
            [f"prm.positive_label ({label}): the classifier has labels 0 to {max(count, 2) - 1}"]
        )
    raw = outputs.astype(np.float64)
    if count == 1:  # one output is the log-odds of label 1
        raw = np.concatenate([np.zeros_like(raw), raw], axis=1)
    exponentials = np.exp(raw - raw.max(axis=1, keepdims=True))
    shares: Array = exponentials[:, label] / exponentials.sum(axis=1)
    return shares
