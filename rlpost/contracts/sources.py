"""The contract of a data source, on its first prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlpost.contracts.report import Finding, point, require
from rlpost.types import Prompt
from rlpost.validation import Section

LOOKED_AT = 200  # prompts


def source_findings(section: Section) -> Iterator[Finding]:
    built: list[Any] = []
    for name, check in (
        ("can be built from its Config", lambda: _built(section, built)),
        ("gives prompts", lambda: _gives_prompts(built[0])),
        ("names each prompt once", lambda: _names_once(built[0])),
        ("is deterministic", lambda: _deterministic(section, built[0])),
    ):
        finding = point(name, check)
        yield finding
        if finding.problem:
            return


def _built(section: Section, built: list[Any]) -> None:
    built.append(section.target(section.config, seed=1))


def _gives_prompts(source: Any) -> str:
    name, size = source.name, len(source)
    require(isinstance(name, str) and name, f"its name is {name!r}; a string for metric names")
    require(size > 0, "it holds no prompts")
    for index in range(min(size, LOOKED_AT)):
        prompt = source.get(0, index)
        require(
            isinstance(prompt, Prompt),
            f"get(0, {index}) gave {type(prompt).__name__}; return rlpost.types.Prompt",
        )
        place = (prompt.epoch, prompt.index)
        require(
            place == (0, index),
            f"get(0, {index}) gave a prompt of epoch and index {place}; pass on what is asked for",
        )
        require(
            (prompt.text is None) != (prompt.messages is None),
            f"prompt {prompt.prompt_id!r} must have either text or messages",
        )
    return f"{name}, {size} prompts"


def _names_once(source: Any) -> None:
    names = [source.get(0, index).prompt_id for index in range(min(len(source), LOOKED_AT))]
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, f"{', '.join(twice[:3])} stand there twice; a prompt_id names one row")


def _deterministic(section: Section, source: Any) -> None:
    other = section.target(section.config, seed=1)
    for epoch in (1, 0):
        for index in range(min(len(source), LOOKED_AT)):
            require(
                source.get(epoch, index) == other.get(epoch, index),
                f"get({epoch}, {index}) differs between two copies; the order is a pure function "
                "of seed, epoch and index",
            )
