"""Cutting a response into steps. Pure, except that the separator is looked up in a tokenizer.

Letters: L tokens of a rollout, S steps. Only tokens of the policy (loss_mask 1) belong to steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt

from rlpost.errors import ConfigError
from rlpost.types import Array

OUTSIDE = -1  # step index of a token that belongs to no step


@dataclass(frozen=True)
class StepsConfig:
    """`separator` null: every turn is one step."""

    separator: Annotated[str, Field(min_length=1)] | list[NonNegativeInt] | None

    def __post_init__(self) -> None:
        if self.separator == []:
            raise ValueError("separator ([]) names no token; give text, token ids, or null (turns)")


@dataclass(frozen=True)
class Steps:
    """Prompt [1, 2], answer [5, 9, 6] and separator 9:

    Steps(index_L=[-1, -1, 0, 0, 1], ends=(3, 4))
    """

    index_L: Array  # int32, OUTSIDE where loss_mask is 0
    ends: tuple[int, ...]  # [S], position of each step's last token

    def tokens(self, token_ids: Array, step: int) -> list[int]:
        return [int(token) for token in token_ids[self.index_L == step]]


def split_steps(token_ids: Array, loss_mask: Array, separator_ids: Sequence[int]) -> Steps:
    """A separator ends its step and is part of it, the end of a turn ends one too: the rest of a
    turn after its last separator is its last step."""
    mask = loss_mask.astype(bool)
    last_of_turn = mask & ~np.append(mask[1:], False)
    ends = mask & (np.isin(token_ids, list(separator_ids)) | last_of_turn)
    # A token's step is the number of steps that ended before it.
    before = np.cumsum(ends) - ends
    return Steps(
        index_L=np.where(mask, before, OUTSIDE).astype(np.int32),
        ends=tuple(int(position) for position in np.flatnonzero(ends)),
    )


def separator_ids(separator: str | Sequence[int] | None, tokenizer: Any) -> tuple[int, ...]:
    """Ids of the tokens that end a step: those whose text holds `separator`.

    A vocabulary may spell a line break in many tokens ("\\n", ".\\n", "\\n\\n"); each ends a step.
    Raises ConfigError when the vocabulary has none, or an id is not in it.
    """
    if separator is None:
        return ()
    size = len(tokenizer)
    if not isinstance(separator, str):
        beyond = [token for token in separator if token >= size]
        if beyond:
            raise ConfigError(
                [f"prm.steps.separator: {beyond} are no token ids; the vocabulary has {size}"]
            )
        return tuple(separator)
    found = tuple(token for token in range(size) if separator in tokenizer.decode([token]))
    if not found:
        raise ConfigError(
            [
                f"prm.steps.separator ({separator!r}): no token of the vocabulary holds it, so no "
                "step would ever end; give another text, or token ids"
            ]
        )
    return found
