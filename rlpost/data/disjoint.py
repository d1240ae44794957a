"""Which prompts of a held-out set are also trained on."""

from __future__ import annotations

from collections.abc import Iterator

from rlpost.data.base import PromptSource
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


def shared_prompts(train: PromptSource, held_out: PromptSource) -> list[tuple[str, str]]:
    """(held-out id, train id) of every held-out prompt that is also trained on."""
    seen = dict(contents(train))
    return [(name, seen[text]) for text, name in contents(held_out) if text in seen]
