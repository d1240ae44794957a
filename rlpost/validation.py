"""Checks plain nodes (dicts of YAML values) against frozen dataclasses, and reports every problem.

A node with `_target_` becomes a `Section`: the class and its validated `Config`. Nodes nest, so a
field of type `Section`, `list[Section]` or `dict[str, Section]` holds parts with targets of their
own. Types are strict: a quoted number is not a number, and an unknown key is an error.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, GetJsonSchemaHandler, ValidationError, ValidationInfo
from pydantic_core import core_schema

from rlpost.wording import adapter, describe_errors, join, nearest

__all__ = ["TARGET", "Section", "Seed", "Validator", "import_target", "nearest"]

TARGET = "_target_"
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what every random generator takes
PLACEHOLDER = "_section_"  # stands for a nested node that was validated before its parent


@dataclasses.dataclass(frozen=True)
class Section:
    """A class to build and the Config to build it from.

    Section("reward", rlpost.rewards.exact.Exact, ExactConfig(...))
    """

    path: str  # where it stands in the configuration, for messages
    target: type[Any]
    config: Any  # instance of target.Config

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(_section_of_placeholder)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "node with _target_"}


def _section_of_placeholder(value: Any, info: ValidationInfo) -> Any:
    """Section of the placeholder that `Validator` left in the node."""
    sections = (info.context or {}).get("sections", {})
    if not isinstance(value, dict) or PLACEHOLDER not in value:
        raise ValueError(f"got {value!r}; a node with {TARGET} belongs here")
    return sections[value[PLACEHOLDER]]


class Validator:
    """Collects `problems` (one line each) over any number of nodes."""

    def __init__(self, trusted_prefixes: Sequence[str]) -> None:
        self.problems: list[str] = []
        self._prefixes = tuple(trusted_prefixes)
        self._sections: dict[str, Section | None] = {}

    def validate(self, cls: type[Any], node: Mapping[str, Any], path: str = "") -> Any:
        """Instance of dataclass `cls`, or None after adding to `problems`."""
        before = len(self.problems)
        fields = {key: self._replaced(value, join(path, key)) for key, value in node.items()}
        try:
            config = adapter(cls).validate_json(
                json.dumps(fields),
                strict=True,
                extra="forbid",
                context={"sections": self._sections},
            )
        except ValidationError as error:
            self.problems += describe_errors(cls, error.errors(), node, path)
        except AttributeError:
            # An invariant looked into a part that is None because it has problems of its own.
            if len(self.problems) == before:
                raise
        else:
            return config if len(self.problems) == before else None
        return None

    def _replaced(self, value: Any, path: str) -> Any:
        if isinstance(value, Mapping) and TARGET in value:
            self._sections[path] = self._section(value, path)
            return {PLACEHOLDER: path}
        if isinstance(value, Mapping):
            return {key: self._replaced(item, join(path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self._replaced(item, join(path, row)) for row, item in enumerate(value)]
        if isinstance(value, float) and math.isinf(value):  # a deadline or a rate that is none
            self.problems.append(f"{path}: got {value}; allowed: finite numbers")
        return value

    def _section(self, node: Mapping[str, Any], path: str) -> Section | None:
        try:
            target = import_target(node[TARGET], self._prefixes)
        except ValueError as error:
            self.problems.append(f"{join(path, TARGET)}: got {node[TARGET]!r}; {error}")
            return None
        options = {key: value for key, value in node.items() if key != TARGET}
        return Section(path, target, self.validate(target.Config, options, path))


def import_target(name: Any, prefixes: Sequence[str]) -> type[Any]:
    """The class called `name`. Raises ValueError if it is untrusted, not there or has no Config."""
    if not isinstance(name, str) or not name.startswith(tuple(prefixes)):
        raise ValueError(f"must start with one of {list(prefixes)} (see trusted_prefixes)")
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"can't import module {module_name}: {error}; add the folder that holds it to "
            "PYTHONPATH"
        ) from error
    target = getattr(module, attribute, None)
    if target is None:
        names = [key for key, value in vars(module).items() if hasattr(value, "Config")]
        raise ValueError(f"module {module_name} has no {attribute!r}{nearest(attribute, names)}")
    if not dataclasses.is_dataclass(getattr(target, "Config", None)):
        raise ValueError("the class has no `Config` dataclass, so it can't stand here")
    return target  # type: ignore[no-any-return]
