"""Chain sums with their worked solution: what a supervised warm start imitates."""

from __future__ import annotations

import dataclasses
import string
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from rlpost.data.order import stable_hash
from rlpost.data.reasoning_gym import (
    Exclude,
    ReasoningGymSource,
    ReasoningGymSourceConfig,
    TaskSeed,
)
from rlpost.types import Prompt

TEMPLATE_FIELDS = ("prompt", "answer", "solution")


@dataclass(frozen=True)
class WorkedChainSumSourceConfig:
    params: dict[str, Any]
    size: PositiveInt
    task_seed: TaskSeed
    exclude: list[Exclude]
    unfinished_share: Annotated[float, Field(ge=0, le=1)]
    prompt_template: str

    def __post_init__(self) -> None:
        fields = [name for _, name, _, _ in string.Formatter().parse(self.prompt_template) if name]
        if unknown := sorted({*fields} - {*TEMPLATE_FIELDS}):
            raise ValueError(
                f"prompt_template ({self.prompt_template!r}) names {{{unknown[0]}}}; known: "
                f"{', '.join(f'{{{name}}}' for name in TEMPLATE_FIELDS)}"
            )


class WorkedChainSumSource:
    """Prompt "7+5-2=" with completion "7+5=12\\n12-2=10\\n10": one step a line, then the answer.

    A share of the solutions stops a step early and gives the running total, "7+5=12\\n12", as a
    careless writer does: what imitates them knows the arithmetic and has the habit to correct.

    `prompt_template` may show the finished solution in the prompt: what a teacher with a hint
    learns to read.
    """

    Config = WorkedChainSumSourceConfig

    def __init__(self, config: WorkedChainSumSourceConfig, *, seed: int) -> None:
        inner = ReasoningGymSourceConfig(
            task="chain_sum",
            params=config.params,
            size=config.size,
            task_seed=config.task_seed,
            exclude=config.exclude,
            prompt_template="{metadata[expression]}=",
            remove_spaces=True,
            chat=False,
            system_prompt=None,
        )
        self._source = ReasoningGymSource(inner, seed=seed)
        self._unfinished_share = config.unfinished_share
        self._template = config.prompt_template

    @property
    def name(self) -> str:
        return "worked_chain_sum"

    def __len__(self) -> int:
        return len(self._source)

    def get(self, epoch: int, index: int) -> Prompt:
        prompt = self._source.get(epoch, index)
        expression = prompt.metadata["entry"]["metadata"]["expression"]
        share = stable_hash("unfinished", prompt.prompt_id, bits=32) / 2**32
        solve = unfinished_solution if share < self._unfinished_share else worked_solution
        text = self._template.format(
            prompt=prompt.text, answer=prompt.answer, solution=worked_solution(expression)
        )
        return dataclasses.replace(prompt, text=text, completion=solve(expression))


def worked_solution(expression: str) -> str:
    """Left to right, one operation a line: "5 - -3 + 1" -> "5--3=8\\n8+1=9\\n9"."""
    first, *rest = expression.split()
    total = int(first)
    lines = []
    for operator, term in zip(rest[0::2], rest[1::2], strict=True):
        result = total + int(term) if operator == "+" else total - int(term)
        lines.append(f"{total}{operator}{term}={result}")
        total = result
    return "\n".join([*lines, str(total)])


def unfinished_solution(expression: str) -> str:
    """Without its last operation: "5 - -3 + 1" -> "5--3=8\\n8"."""
    return worked_solution(expression.rsplit(maxsplit=2)[0])
