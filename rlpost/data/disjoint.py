"""Train and held-out sets share no prompt."""

from __future__ import annotations

from collections.abc import Iterator

from rlpost.data.base import PromptSource
from rlpost.errors import DataError
from rlpost.types import Prompt


def content(prompt: Prompt) -> str:
    """What the policy is asked, without the prompt's identity."""
    if prompt.text is not None:
        return prompt.text
    turns = prompt.messages or ()
    return "\x1e".join(f"{turn['role']}\x1f{turn['content']}" for turn in turns)


def contents(source: PromptSource) -> Iterator[tuple[str, str]]:
    """(content, prompt id) of every prompt of the source."""
    for index in range(len(source)):
        prompt = source.get(0, index)
        yield content(prompt), prompt.prompt_id


def require_disjoint(train: PromptSource, held_out: PromptSource) -> None:
    """Raises DataError with the number of shared prompts and the first of them."""
    seen = dict(contents(train))
    shared = [(name, seen[text]) for text, name in contents(held_out) if text in seen]
    if shared:
        name, twin = shared[0]
        raise DataError(
            f"{len(shared)} of {len(held_out)} prompts of held-out set {held_out.name!r} are also "
            f"in train set {train.name!r} (first: {name} = {twin}); "
            "give the held-out set `exclude`, or take these rows out of its file"
        )
