"""The contract of a reward, and of a program that scores steps, on a few made-up samples."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.contracts.report import (
    Broken,
    Finding,
    limited,
    milliseconds,
    point,
    require,
    seconds_of,
)
from rlpost.rewards.base import RewardInputs, StepInputs
from rlpost.types import Prompt
from rlpost.validation import Section
from rlpost.wording import nearest

RESPONSES = ("", "\n\n", "10", "7+5=12\n12-2=10\n10", "well, 11", "((((", r"\boxed{", "²", "nan")
STEPS = ((), ("7+5=12\n", "12-2=10\n", "10"), ("7+5=11\n", "nothing"), ("",))
TEXTS = ("prompt_id", "text", "answer", "completion")
GIVEN = (*TEXTS, "metadata")  # what may be given of a prompt


def made_up_prompt(changes: Mapping[str, Any]) -> Prompt:
    """A sum whose answer is 10, with what reasoning-gym's own scorers look at.

    Raises ValueError for `changes` that are no fields of a prompt.
    """
    for name, value in changes.items():
        if name not in GIVEN:
            raise ValueError(
                f"a prompt has no field {name!r}{nearest(name, GIVEN)}; fields: {', '.join(GIVEN)}"
            )
        wanted, what = (str, "text") if name in TEXTS else (Mapping, "keys: metadata.<key>=...")
        if not isinstance(value, wanted):
            raise ValueError(f"field {name!r} of a prompt holds {what}, not {value!r}")
    expression = {"expression": "7 + 5 - 2", "source_dataset": "chain_sum"}
    entry = {"question": "7 + 5 - 2 = ?", "answer": "10", "metadata": expression}
    metadata = {"task": "chain_sum", "entry": entry, **changes.get("metadata", {})}
    given = {key: value for key, value in changes.items() if key != "metadata"}
    whole = {"prompt_id": "check/0", "text": "7+5-2=", "answer": "10", **given}
    return Prompt(epoch=0, index=0, metadata=metadata, **whole)


@dataclass
class Calls:
    """One way of calling the object under check; `results` of all samples, in their order."""

    section: Section
    samples: Sequence[Any]
    call: Callable[[Any, Any], Any]
    limit_s: float

    def build(self) -> Any:
        return self.section.target(self.section.config)

    def results(self, scorer: Any, samples: Sequence[Any]) -> list[Any]:
        return [self._one(scorer, sample) for sample in samples]

    def _one(self, scorer: Any, sample: Any) -> Any:
        with limited(self.limit_s):
            return self.call(scorer, sample)

    def is_deterministic(self) -> None:
        scorer = self.build()
        first = self.results(scorer, self.samples)
        again = self.results(scorer, self.samples[::-1])[::-1]
        other = self.results(self.build(), self.samples)
        for sample, *values in zip(self.samples, first, again, other, strict=True):
            require(
                same(values),
                f"{shown(sample)} got {values[0]!r}, then {values[1]!r}, and {values[2]!r} from "
                "another copy; a score may depend on its inputs and the Config alone",
            )

    def is_fast_enough(self) -> str:
        scorer = self.build()
        self.results(scorer, self.samples[:1])  # imports
        slowest = max(
            seconds_of(lambda: self.call(scorer, sample), self.limit_s)  # noqa: B023
            for sample in self.samples
        )
        return f"at most {milliseconds(slowest)}, allowed {self.limit_s:g} s"


def reward_findings(section: Section, prompt: Prompt, *, limit_s: float) -> Iterator[Finding]:
    samples = [
        RewardInputs(prompt, response, reason, len(response))
        for response in RESPONSES
        for reason in ("stop", "length")
    ]
    calls = Calls(section, samples, lambda reward, inputs: reward.score(inputs), limit_s)
    built = point("can be built from its Config", lambda: _built(calls))
    yield built
    if built.problem:
        return
    scored = point("score() gives a finite number for any response", lambda: _finite(calls))
    yield scored
    if scored.problem:
        return
    yield point("score() is deterministic", calls.is_deterministic)
    yield point("score() keeps to its time limit", calls.is_fast_enough)


def step_findings(section: Section, prompt: Prompt, *, limit_s: float) -> Iterator[Finding]:
    samples = [StepInputs(prompt, steps) for steps in STEPS]
    calls = Calls(section, samples, lambda program, inputs: program.score_steps(inputs), limit_s)
    built = point("can be built from its Config", lambda: _built(calls))
    yield built
    if built.problem:
        return
    yield point("gives_values is true or false", lambda: _says_what_it_gives(section))
    scored = point("score_steps() gives one score for each step", lambda: _one_each(calls))
    yield scored
    if scored.problem:
        return
    yield point("score_steps() is deterministic", calls.is_deterministic)
    yield point("score_steps() keeps to its time limit", calls.is_fast_enough)


def _built(calls: Calls) -> None:
    calls.build()


def _finite(calls: Calls) -> None:
    scorer, before = calls.build(), pickle.dumps(calls.samples)
    for sample in calls.samples:
        require_number(calls.results(scorer, [sample])[0], f"score() of {shown(sample)}")
    require(
        repr(pickle.loads(before)) == repr(calls.samples),
        "it changes the prompt's metadata, which other rewards read; copy what you change",
    )


def _says_what_it_gives(section: Section) -> None:
    value = getattr(section.target, "gives_values", None)
    require(
        isinstance(value, bool),
        f"it is {value!r}; write `gives_values = False` in the class (true: a score is the chance "
        "that the answer will be right)",
    )


def _one_each(calls: Calls) -> None:
    scorer = calls.build()
    for sample in calls.samples:
        scores = calls.results(scorer, [sample])[0]
        require(
            isinstance(scores, Sequence) and len(scores) == len(sample.steps),
            f"{len(sample.steps)} steps got {scores!r}; give a list with one score for each, None "
            "where the program can't tell",
        )
        for score in scores:
            if score is not None:
                require_number(score, f"a score of {shown(sample)}")


def require_number(value: Any, what: str) -> None:
    if inspect.iscoroutine(value):
        value.close()
        raise Broken(f"{what} is awaited; write a plain `def`, not async")
    number = hasattr(value, "__float__") and not isinstance(value, str)
    require(number, f"{what} is {value!r} ({type(value).__name__}); return a float")
    require(
        math.isfinite(float(value)),
        f"{what} is {value!r}; return a finite number, or raise an error: a missing verdict is no "
        "number",
    )


def same(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def shown(sample: Any) -> str:
    if isinstance(sample, RewardInputs):
        return f"the response {sample.response!r} ({sample.finish_reason})"
    return f"the steps {list(sample.steps)!r}"
