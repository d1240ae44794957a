"""What the teacher reads before the response, and which teacher reads it. Pure."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Iterator
from dataclasses import dataclass

from rlpost.errors import DataError
from rlpost.types import Prompt

FIELDS = ("prompt", "answer", "solution", "metadata")


@dataclass(frozen=True)
class TeacherContext:
    """Goes to the rollout worker, which tokenises the teacher's prompt once per group.

    `hint_template` None: the teacher reads the student's own prompt. `teachers` are the names of
    config.teachers; `route_by` is the metadata field whose value names one of them, or None for
    a single teacher. `max_length`: tokens of prompt and response that every teacher can read.
    """

    hint_template: str | None
    route_by: str | None
    teachers: tuple[str, ...]
    max_length: int

    def teacher_of(self, prompt: Prompt) -> str:
        """Raises DataError for a prompt that no teacher is given for."""
        if self.route_by is None:
            return self.teachers[0]
        if self.route_by not in prompt.metadata:
            raise DataError(
                f"prompt {prompt.prompt_id!r} has no metadata field {self.route_by!r} "
                f"(distillation.route_by); it has {', '.join(sorted(prompt.metadata)) or 'none'}"
            )
        name = str(prompt.metadata[self.route_by])
        if name not in self.teachers:
            raise DataError(
                f"prompt {prompt.prompt_id!r}: no teacher for {self.route_by} = {name!r} "
                f"(distillation.route_by); teachers are {', '.join(self.teachers)}; add "
                f"teachers.{name}, or filter such prompts out"
            )
        return name

    def prompt_of(self, prompt: Prompt) -> Prompt | None:
        """The prompt with the hint in it; None when the teacher reads the student's prompt.

        A chat gets the hint in place of its last turn's content. Raises DataError.
        """
        if self.hint_template is None:
            return None
        if prompt.messages is None:
            return dataclasses.replace(prompt, text=self._render(prompt, prompt.text or ""))
        *before, last = prompt.messages
        hinted = {**last, "content": self._render(prompt, last["content"])}
        return dataclasses.replace(prompt, messages=(*before, hinted))

    def _render(self, prompt: Prompt, text: str) -> str:
        assert self.hint_template is not None
        if "solution" in fields_of(self.hint_template) and prompt.completion is None:
            raise DataError(
                f"distillation.hint_template names {{solution}}, but prompt {prompt.prompt_id!r} "
                "has none; use data with worked answers (data=worked_chain_sum, or "
                "data.completion_key of a file)"
            )
        try:
            return self.hint_template.format(
                prompt=text,
                answer=prompt.answer,
                solution=prompt.completion,
                metadata=prompt.metadata,
            )
        except (KeyError, IndexError, AttributeError) as error:
            raise DataError(
                f"distillation.hint_template {self.hint_template!r} names {error}, which prompt "
                f"{prompt.prompt_id!r} lacks; its metadata has {sorted(prompt.metadata)}"
            ) from error


def fields_of(template: str) -> list[str]:
    """Names in braces: "{answer} {metadata[level]}" -> ["answer", "metadata"]."""
    return list(_fields(template))


def _fields(template: str) -> Iterator[str]:
    for _, field, _, _ in string.Formatter().parse(template):
        if field is not None:
            yield field.split("[")[0].split(".")[0]


def check_template(template: str) -> None:
    """Raises ValueError for a field that no prompt has, or when the prompt itself is left out."""
    names = fields_of(template)
    if unknown := [name for name in names if name not in FIELDS]:
        raise ValueError(
            f"hint_template ({template!r}) names {{{unknown[0]}}}; known: {{prompt}}, {{answer}}, "
            "{solution}, {metadata[<key>]}; write {{ and }} for literal braces"
        )
    if "prompt" not in names:
        raise ValueError(
            f"hint_template ({template!r}) leaves {{prompt}} out; the teacher needs the task"
        )
