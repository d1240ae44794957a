"""The contract of a prompt source. Order is a pure function of (seed, epoch, index).

Every implementation passes tests/contract/test_data.py.
"""

from __future__ import annotations

from typing import Protocol

from rlpost.types import Prompt


class PromptSource(Protocol):
    """A finite data set of prompts, re-ordered in each epoch."""

    @property
    def name(self) -> str:
        """Used in metric names: `eval/<name>/accuracy`."""

    def __len__(self) -> int:
        """Prompts per epoch."""

    def get(self, epoch: int, index: int) -> Prompt:
        """The prompt at `index` of `epoch`. Pure: same arguments, same prompt, in any process."""
