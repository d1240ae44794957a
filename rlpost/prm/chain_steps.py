"""Verifying the lines of a worked chain of sums, such as "7+5=12\\n12-2=10\\n10"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlpost.errors import DataError
from rlpost.rewards.base import StepInputs
from rlpost.types import Prompt

STEP = re.compile(r"(-?\d+)([+-])(-?\d+)=(-?\d+)")


@dataclass(frozen=True)
class ChainStepsConfig:
    pass


class ChainSteps:
    """1.0 for a line that is right and continues the chain, else 0.0.

    Line k must read "<total so far><operator><next term>=<new total>" for the k-th operation of the
    prompt; the line after the last operation is the answer. After a wrong line the chain goes on
    from what that line claims, so one slip is blamed once. Whatever follows the answer, or a line
    that can't be read, is wrong. A blank step is missing.
    """

    Config = ChainStepsConfig
    gives_values = False

    def __init__(self, config: ChainStepsConfig) -> None:
        self.config = config

    def score_steps(self, inputs: StepInputs) -> list[float | None]:
        """Raises DataError for a prompt that holds no chain of sums."""
        chain = operations(inputs.prompt)
        total: int | None = chain[0]
        scores: list[float | None] = []
        done = 0
        for text in inputs.steps:
            line = text.strip()
            if not line:
                scores.append(None)
                continue
            right, total, done = judged(line, total, chain[1:], done)
            scores.append(float(right))
        return scores


Operation = tuple[str, int]


def operations(prompt: Prompt) -> tuple[int, *tuple[Operation, ...]]:
    """ "5--3+1=" -> (5, ("-", -3), ("+", 1))."""
    text = re.sub(r"\s", "", prompt.text or "")
    match = re.fullmatch(r"(-?\d+)((?:[+-]-?\d+)*)=", text)
    if match is None:
        raise DataError(
            f"prompt {prompt.prompt_id!r} is no chain of sums such as '7+5-2=': {text!r}; use "
            "data=chain_sum, or another program in prm.program"
        )
    pairs = re.findall(r"([+-])(-?\d+)", match[2])
    return (int(match[1]), *((operator, int(term)) for operator, term in pairs))


def judged(
    line: str, total: int | None, chain: tuple[Operation, ...], done: int
) -> tuple[bool, int | None, int]:
    """(is the line right, total it claims, operations done); total None: the chain has ended."""
    step = STEP.fullmatch(line)
    if step is None:
        return done == len(chain) and total is not None and line == str(total), None, done
    first, operator, term, result = int(step[1]), step[2], int(step[3]), int(step[4])
    value = first + term if operator == "+" else first - term
    follows = first == total and done < len(chain) and (operator, term) == chain[done]
    return follows and value == result, result, done + 1
