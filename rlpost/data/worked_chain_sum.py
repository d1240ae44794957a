"""Chain sums with their worked solution: what a supervised warm start imitates."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from pydantic import PositiveInt

from rlpost.data.reasoning_gym import (
    Exclude,
    ReasoningGymSource,
    ReasoningGymSourceConfig,
    TaskSeed,
)
from rlpost.types import Prompt


@dataclass(frozen=True)
class WorkedChainSumSourceConfig:
    params: dict[str, Any]
    size: PositiveInt
    task_seed: TaskSeed
    exclude: list[Exclude]


class WorkedChainSumSource:
    """Prompt "7+5-2=" with completion "7+5=12\\n12-2=10\\n10": one step a line, then the answer."""

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

    @property
    def name(self) -> str:
        return "worked_chain_sum"

    def __len__(self) -> int:
        return len(self._source)

    def get(self, epoch: int, index: int) -> Prompt:
        prompt = self._source.get(epoch, index)
        expression = prompt.metadata["entry"]["metadata"]["expression"]
        return dataclasses.replace(prompt, completion=worked_solution(expression))


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
