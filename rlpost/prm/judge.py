"""Steps judged by an engine: it writes a verdict on each step, several times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveInt

from rlpost.errors import ConfigError, EngineError
from rlpost.prm.base import Response, Services
from rlpost.prm.credit import CreditConfig
from rlpost.prm.limits import LimitsConfig, refuse_progress
from rlpost.prm.steps import StepsConfig
from rlpost.rewards.extract import Pattern, last_match, require_answer_pattern
from rlpost.types import GenerateRequest, Prompt, Sampling
from rlpost.validation import Section

Rule = Literal["majority", "mean"]
FIELDS = ("prompt", "before", "step")


@dataclass(frozen=True)
class JudgePrmConfig:
    """`model` and `engine` null: the policy's own engines judge."""

    credit: CreditConfig | None
    steps: StepsConfig
    model: Section | None
    engine: Section | None
    template: str
    chat: bool
    verdict_pattern: Pattern
    good_verdict: str
    bad_verdict: str
    num_votes: PositiveInt
    rule: Rule
    temperature: NonNegativeFloat
    max_verdict_tokens: PositiveInt
    limits: LimitsConfig

    def __post_init__(self) -> None:
        if (self.model is None) != (self.engine is None):
            raise ValueError(
                "model and engine go together: give both for a judge of its own, or set both to "
                "null to ask the policy's engines"
            )
        if self.num_votes > 1 and self.temperature == 0:
            raise ValueError(
                f"num_votes ({self.num_votes}) at temperature 0 are copies of one vote; set "
                "num_votes: 1, or a temperature"
            )
        if self.good_verdict.casefold() == self.bad_verdict.casefold():
            raise ValueError(f"good_verdict and bad_verdict are both {self.good_verdict!r}")
        self._check_template()
        require_answer_pattern("verdict_pattern", self.verdict_pattern)

    def _check_template(self) -> None:
        try:
            self.template.format(**dict.fromkeys(FIELDS, ""))
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"template may hold {', '.join(f'{{{name}}}' for name in FIELDS)} only; write {{{{ "
                f"for a brace: {error!r}"
            ) from error
        if "{step}" not in self.template:
            raise ValueError(f"template ({self.template!r}) must hold {{step}}, what is judged")

    def conflicts(self, run: Any) -> Iterator[str]:
        yield from refuse_progress(self.credit, "a judge")
        yield from self.limits.conflicts(run)
        if self.engine is None and run.engine is None:
            yield "prm.engine: null, but the run has no engine to ask; give prm a model and engine"


class JudgePrm:
    """StepScorer. Score 1.0 for a good step, 0.0 for a bad one; missing when the votes don't say.

    A vote that can't be read is missing, not bad. An engine that fails leaves all steps of the
    response missing, and is counted; so are, in a row, responses none of whose votes can be read.
    """

    Config = JudgePrmConfig

    def __init__(self, config: JudgePrmConfig, *, services: Services) -> None:
        self._config = config
        self._services = services
        self._budget = config.limits.budget("prm (judge)")
        # A weak judge may often say nothing; one that never does would leave the run without a prm.
        self._unread = replace(config.limits, max_failure_fraction=1.0).budget("prm (its verdicts)")

    async def start(self) -> None:
        """Raises ConfigError when the judge's tokenizer can't spell the question."""
        tokenizer = self._services.scorer_tokenizer
        if self._config.chat and not tokenizer.chat_template:
            raise ConfigError(
                [
                    "prm.chat: true, but the judge's tokenizer has no chat template; set false, or "
                    "give prm.model an instruction-tuned model"
                ]
            )
        unknown, question = tokenizer.unk_token_id, self._filled("", "", "")
        if unknown is not None and unknown in tokenizer.encode(question):
            raise ConfigError(
                [
                    "prm.template holds characters that the vocabulary of the judge's model lacks; "
                    "change it, or give prm a model and an engine of its own"
                ]
            )

    async def score(self, response: Response) -> list[float]:
        requests = self._requests(response)
        try:
            answers = await self._services.generate(requests)
        except EngineError as error:
            self._budget.failed(f"{response.sample}: {error}")
            return [math.nan] * len(response.ends)
        self._budget.succeeded()
        decode = self._services.scorer_tokenizer.decode
        texts = [decode(answer.token_ids.tolist(), skip_special_tokens=True) for answer in answers]
        votes = [vote_of(text, self._config) for text in texts]
        self._count(response, votes, texts)
        size = self._config.num_votes
        return [
            settled(votes[start : start + size], self._config.rule)
            for start in range(0, len(votes), size)
        ]

    async def close(self) -> None: ...

    def _count(self, response: Response, votes: Sequence[float], texts: Sequence[str]) -> None:
        """A response of which no verdict can be read was not judged."""
        judgeable = any(step.strip() for step in response.inputs.steps)
        if judgeable and all(math.isnan(vote) for vote in votes):
            self._unread.failed(
                f"{response.sample}: prm.verdict_pattern finds no verdict in any of {len(votes)} "
                f"answers of the judge, such as {texts[0]!r}"
            )
        else:
            self._unread.succeeded()

    def _requests(self, response: Response) -> list[GenerateRequest]:
        """Votes of the first step first."""
        config = self._config
        sampling = Sampling(config.temperature, 1.0, config.max_verdict_tokens)
        return [
            GenerateRequest(
                request_id=f"{response.sample}/step{step}/vote{vote}",
                token_ids=tuple(token_ids),
                sampling=sampling,
                seed=self._services.seed_of(response.sample, step, vote),
            )
            for step, token_ids in enumerate(self._prompts(response))
            for vote in range(config.num_votes)
        ]

    def _filled(self, prompt: str, before: str, step: str) -> str:
        return self._config.template.format(prompt=prompt, before=before, step=step)

    def _prompts(self, response: Response) -> Iterator[list[int]]:
        tokenizer, steps = self._services.scorer_tokenizer, response.inputs.steps
        for index, step in enumerate(steps):
            asked = prompt_text(response.inputs.prompt)
            text = self._filled(asked, "".join(steps[:index]), step)
            if not self._config.chat:
                yield list(tokenizer.encode(text))
                continue
            yield list(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}],
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                )
            )


def prompt_text(prompt: Prompt) -> str:
    """The text, or the turns of a chat one under the other."""
    if prompt.messages is None:
        return prompt.text or ""
    return "\n".join(turn["content"] for turn in prompt.messages)


def vote_of(text: str, config: JudgePrmConfig) -> float:
    """1.0 good, 0.0 bad, NaN when the last match of the pattern is neither, or there is none."""
    verdict = last_match(config.verdict_pattern, text)
    if verdict is None:
        return math.nan
    values = {config.good_verdict.casefold(): 1.0, config.bad_verdict.casefold(): 0.0}
    return values.get(verdict.casefold(), math.nan)


def settled(votes: Sequence[float], rule: Rule) -> float:
    """`mean` of the valid votes, or what their `majority` says (a tie is missing)."""
    valid = [vote for vote in votes if not math.isnan(vote)]
    if not valid:
        return math.nan
    mean = sum(valid) / len(valid)
    if rule == "mean":
        return mean
    return math.nan if mean == 0.5 else float(mean > 0.5)
