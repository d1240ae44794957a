"""Explains override errors that Hydra raises before the configuration exists.

For each override: is its group, option or key known, and if not, which valid name is nearest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException

from rlpost.composition import CONF, compose_node
from rlpost.config import key_paths
from rlpost.wording import nearest

__all__ = ["CONF", "compose_node", "explain"]


def explain(error: HydraException, arguments: Sequence[str]) -> str:
    """One line for each override that names something unknown; else Hydra's own message."""
    if isinstance(error, OverrideParseException):
        return f"can't read the override {error.override!r}: {error.message}"
    given, _ = get_args_parser().parse_known_args(list(arguments))
    folders = [CONF, *([Path(given.config_dir).absolute()] if given.config_dir else [])]
    found = unknown_names(given.overrides, folders)
    return "\n  - ".join(["command line:", *found]) if found else f"command line: {error}"


def unknown_names(overrides: Sequence[str], folders: Sequence[Path] = (CONF,)) -> list[str]:
    """One line per override whose group, option or key does not exist."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    groups = options_by_group(folders)
    choices = [override for override in parsed if name_of(override) in groups]
    wrong = {str(override.input_line): unknown_option(override, groups) for override in choices}
    valid = [for_one_job(item) for item in choices if wrong[str(item.input_line)] is None]
    others = [override for override in parsed if name_of(override) not in groups]
    lines = [line for line in wrong.values() if line is not None]
    return [*lines, *unknown_keys(others, [*groups], known_keys(valid, folders))]


def name_of(override: Override) -> str:
    """The group or key, without `+`, `~` and a leading slash."""
    return (override.key_or_group or "").lstrip("/")


def unknown_option(override: Override, groups: dict[str, list[str]]) -> str | None:
    options = groups[name_of(override)]
    for item in chosen(override):
        if isinstance(item, str) and item not in options:
            return unknown(str(override.input_line), item, options)
    return None


def chosen(override: Override) -> list[Any]:
    """One option, all of a list, or each of a sweep's."""
    if override.is_discrete_sweep():
        return list(override.sweep_iterator())
    value = override.value()
    return value if isinstance(value, list) else [value]


def for_one_job(override: Override) -> str:
    """The override as the first job of a sweep has it."""
    if not override.is_discrete_sweep():
        return str(override.input_line)
    return f"{override.get_key_element()}={next(override.sweep_string_iterator())}"


def unknown_keys(
    overrides: Sequence[Override], groups: Sequence[str], keys: Sequence[str]
) -> Iterator[str]:
    added = tuple(name_of(item) for item in overrides if item.is_add() or item.is_force_add())
    below = tuple(f"{name}." for name in added)
    for override in overrides:
        name = name_of(override)
        if name in added or name.startswith(("hydra", *below)):
            continue  # `+key` makes the key, and those in it
        if keys and name not in keys:
            yield unknown(str(override.input_line), name, [*groups, *keys])


def known_keys(choices: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Keys of the configuration with these group choices; none if the groups don't compose."""
    try:
        return key_paths(compose_node(choices, folders))
    except HydraException:
        return []


def unknown(given: str, name: str, names: Sequence[str]) -> str:
    """`trainer.lrr=1: unknown name; did you mean 'trainer.lr'?`; without a match, what is there."""
    hint = nearest(name, names)
    if not hint:
        parent = name.rpartition(".")[0]
        near = [item for item in names if item.rpartition(".")[0] == parent]
        hint = f"; valid: {', '.join(near or names)}"
    return f"{given}: unknown name{hint}"


def options_by_group(folders: Sequence[Path]) -> dict[str, list[str]]:
    """{"algorithm": ["grpo", ...], "recipe": [...]}"""
    options: dict[str, list[str]] = {}
    for conf in folders:
        for folder in sorted(path for path in conf.rglob("*") if path.is_dir()):
            group = options.setdefault(folder.relative_to(conf).as_posix(), [])
            group += sorted(file.stem for file in folder.glob("*.yaml"))
    return options
