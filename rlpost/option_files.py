"""The groups and options under conf/ (and --config-dir), read without composing anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

PACKAGE = re.compile(r"# @package ([\w.]+)\n")
LIST = re.compile(r"\+?(?P<group>[\w/]+)=\[")
GLOBAL = "_global_"


def options_by_group(folders: Sequence[Path]) -> dict[str, list[str]]:
    """{"algorithm": ["grpo", ...], "recipe": [...]}"""
    options: dict[str, list[str]] = {}
    for conf in folders:
        for folder in sorted({file.parent for file in conf.rglob("*.yaml")} - {conf}):
            name = folder.relative_to(conf).as_posix()
            if not name.startswith("."):  # a run's folder has one of Hydra's
                options.setdefault(name, []).extend(sorted(f.stem for f in folder.glob("*.yaml")))
    return options


def default_groups(primary: Path) -> list[str]:
    """Those that the file which begins a configuration gives a place, with or without an option."""
    node = yaml.safe_load(primary.read_text()) or {}
    return [group for item in node.get("defaults", []) if isinstance(item, dict) for group in item]


def files_of(group: str, folders: Sequence[Path]) -> list[Path]:
    return [file for conf in folders for file in sorted((conf / group).glob("*.yaml"))]


def package_of(file: Path, group: str) -> str:
    """Where the option's keys stand: `tracking.mlflow`, `_global_`, or the group's own name."""
    found = PACKAGE.match(file.read_text())
    return found[1] if found else group.replace("/", ".")


def is_global(group: str, folders: Sequence[Path]) -> bool:
    """Whether its options set keys anywhere, as recipes do."""
    return any(package_of(file, group) == GLOBAL for file in files_of(group, folders))


def takes_many(group: str, folders: Sequence[Path]) -> bool:
    """Whether several options fit side by side, as each has a place of its own."""
    own = group.replace("/", ".")
    return any(package_of(file, group) != own for file in files_of(group, folders))


def lists_of_one(overrides: Iterable[str], folders: Sequence[Path]) -> list[str]:
    """A line for each list of options of a group whose options would overwrite each other."""
    found = [(LIST.match(override), override) for override in overrides]
    return [
        f"{override}: {match['group']} takes one option, not a list"
        for match, override in found
        if match and files_of(match["group"], folders) and not takes_many(match["group"], folders)
    ]


def options_with(key: str, folders: Sequence[Path]) -> list[str]:
    """The choices that bring a key: loop.colocate -> ["loop=sync"]."""
    group = key.partition(".")[0]
    found = []
    for file in files_of(group, folders):
        prefix = package_of(file, group)
        node = yaml.safe_load(file.read_text())
        paths = [f"{prefix}.{path}" for path in paths_in(node)] if prefix != GLOBAL else []
        if key in paths:
            found.append(f"{group}={file.stem}")
    return found


def paths_in(node: Any) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, dict) else ():
        yield str(key)
        yield from (f"{key}.{path}" for path in paths_in(value))
