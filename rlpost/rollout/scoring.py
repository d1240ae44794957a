"""What is said about a group's answers: rewards of whole answers, and of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlpost.cluster.workers import Worker, gather
from rlpost.rewards.base import RewardInputs
from rlpost.rewards.reward_set import RewardSet, Score
from rlpost.rollout.base import Rollout, Tokenizer
from rlpost.rollout.process_rewards import ProcessRewards, StepScores
from rlpost.types import Prompt
from rlpost.validation import Section


@dataclass(frozen=True)
class PrmParts:
    """The section `prm` and the engines it may ask: its own, or those of the policy."""

    section: Section
    engines: tuple[Worker, ...]
    seed: int


class Scoring:
    """Both kinds of rewards, asked for at the same time; either may be absent."""

    def __init__(self, reward: Section | None, prm: PrmParts | None) -> None:
        self._rewards: RewardSet | None = None if reward is None else reward.target(reward.config)
        self._prm = prm
        self._process_rewards: ProcessRewards | None = None

    async def start(self, tokenizer: Tokenizer, scorer_tokenizer: Tokenizer) -> None:
        """Raises BudgetError for processes that don't start, ConfigError for a prm that does not
        fit the tokenizer."""
        starts = [] if self._rewards is None else [self._rewards.start()]
        if self._prm is not None:
            self._process_rewards = ProcessRewards(
                self._prm.section,
                tokenizer=tokenizer,
                scorer_tokenizer=scorer_tokenizer,
                engines=self._prm.engines,
                seed=self._prm.seed,
            )
            starts.append(self._process_rewards.start())
        await gather(starts)

    async def close(self) -> None:
        """Ends the reward processes."""
        for part in (self._rewards, self._process_rewards):
            if part is not None:
                await part.close()

    async def score(
        self,
        prompt: Prompt,
        rollouts: Sequence[Rollout],
        responses: Sequence[str],
        *,
        with_steps: bool,
    ) -> tuple[list[Score], list[StepScores]]:
        """[G] each, empty where that kind is absent. Raises BudgetError when too many fail."""
        scores, steps = await gather(
            [
                self._scores(prompt, rollouts, responses),
                self._step_scores(prompt, rollouts if with_steps else ()),
            ]
        )
        return self._joined(scores, steps), steps

    async def _scores(
        self, prompt: Prompt, rollouts: Sequence[Rollout], responses: Sequence[str]
    ) -> list[Score]:
        if self._rewards is None:
            return []
        return await gather(
            self._rewards.score(
                RewardInputs(prompt, response, rollout.finish_reason, len(rollout.response_ids))
            )
            for rollout, response in zip(rollouts, responses, strict=True)
        )

    async def _step_scores(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[StepScores]:
        if self._process_rewards is None:
            return []
        return await self._process_rewards.score(prompt, rollouts)

    def _joined(self, scores: list[Score], steps: list[StepScores]) -> list[Score]:
        """The scores with rewards that take in the steps, where the credit mode says so."""
        if self._process_rewards is None or not steps:
            return scores
        return [
            replace(score, total=self._process_rewards.reward(score.total, scored))
            for score, scored in zip(scores, steps, strict=True)
        ]
