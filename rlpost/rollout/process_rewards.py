"""Process rewards of a group: its responses cut into steps, and a score for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.cluster.workers import Worker, gather
from rlpost.data.order import stable_hash
from rlpost.prm.base import Response, Services, StepScorer
from rlpost.prm.credit import combined_reward
from rlpost.prm.steps import Steps, separator_ids, split_steps
from rlpost.rewards.base import StepInputs
from rlpost.rollout.base import Attempts, Rollout, Tokenizer
from rlpost.rollout.classifiers import ClassifierPool
from rlpost.rollout.encoding import decode_response
from rlpost.rollout.engine_pool import EnginePool, Ticket
from rlpost.types import Array, GenerateRequest, Generation, Prompt, sample_id
from rlpost.validation import Section


@dataclass(frozen=True)
class StepScores:
    """The steps of one rollout and the score of each, NaN where missing."""

    steps: Steps
    scores: tuple[float, ...]  # [S]


class ProcessRewards:
    """Built from the `prm` section. `engines` are those it asks, if it asks any."""

    def __init__(
        self,
        section: Section,
        *,
        tokenizer: Tokenizer,
        scorer_tokenizer: Tokenizer,
        engines: Sequence[Worker],
        seed: int,
    ) -> None:
        """Raises ConfigError for a separator that the vocabulary does not have."""
        self._config = section.config
        self._tokenizer = tokenizer
        self._seed = seed
        self._separator_ids = separator_ids(self._config.steps.separator, tokenizer)
        self._judges: EnginePool | None = None
        self._classifiers: ClassifierPool | None = None
        self._connect(engines)
        services = Services(
            tokenizer=tokenizer,
            scorer_tokenizer=scorer_tokenizer,
            generate=self._generate,
            classify=self._classify,
            seed_of=self._seed_of,
        )
        self._scorer: StepScorer = section.target(self._config, services=services)

    async def start(self) -> None:
        await self._scorer.start()

    async def close(self) -> None:
        await self._scorer.close()

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[StepScores]:
        """One for each rollout. Raises BudgetError when scoring fails too often."""
        return await gather(
            self._score_one(prompt, sample_id(prompt.key, index), rollout)
            for index, rollout in enumerate(rollouts)
        )

    def reward(self, outcome: float, scored: StepScores) -> float:
        """The sample's reward: its outcome, with the steps in it under credit mode `aggregate`."""
        credit = self._config.credit
        return outcome if credit is None else combined_reward(credit, outcome, scored.scores)

    async def _score_one(self, prompt: Prompt, sample: str, rollout: Rollout) -> StepScores:
        steps = split_steps(rollout.token_ids, rollout.loss_mask, self._separator_ids)
        texts = tuple(
            decode_response(self._tokenizer, steps.tokens(rollout.token_ids, step))
            for step in range(len(steps.ends))
        )
        scores = await self._scorer.score(
            Response(
                sample=sample,
                inputs=StepInputs(prompt, texts),
                token_ids=tuple(rollout.token_ids.tolist()),
                ends=steps.ends,
            )
        )
        # A blank line, or a lone end token, is no step that anyone could judge.
        kept = [
            score if text.strip() else math.nan for score, text in zip(scores, texts, strict=True)
        ]
        return StepScores(steps, tuple(kept))

    def _connect(self, engines: Sequence[Worker]) -> None:
        limits = getattr(self._config, "limits", None)
        if limits is None:  # no engine is asked
            return
        attempts = Attempts(limits.deadline_s, limits.max_attempts, 0, "prm.limits.deadline_s")
        self._judges = EnginePool(engines, attempts)
        self._classifiers = ClassifierPool(
            engines, deadline_s=limits.deadline_s, max_attempts=limits.max_attempts
        )

    async def _generate(self, requests: Sequence[GenerateRequest]) -> Sequence[Generation]:
        assert self._judges is not None, "the scorer has no limits"
        ticket = Ticket(tuple(requests))
        await self._judges.submit([ticket])
        return await self._judges.collect(ticket)

    async def _classify(self, token_ids: Sequence[int]) -> Array:
        assert self._classifiers is not None, "the scorer has no limits"
        return await self._classifiers.classify(token_ids)

    def _seed_of(self, sample: str, step: int, vote: int) -> int:
        return stable_hash(self._seed, "judge", sample, step, vote, bits=31)
