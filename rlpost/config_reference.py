"""Writes docs/configuration.md from conf/: key, default, allowed values and the comment.

Run `python -m rlpost.config_reference` after a change under conf/; a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.composition import CONF
from rlpost.config import RoleConfig, RunConfig
from rlpost.validation import TARGET, import_target
from rlpost.wording import describe, schema, schema_at

OUTPUT = CONF.parent / "docs" / "configuration.md"
HEAD = """# Configuration reference

Made from the files under `conf/` by `python -m rlpost.config_reference`; edit those, not this page.

A run is `conf/config.yaml` plus one option of each group. Choose an option with `group=option`, set
a key with `group.key=value`, switch an optional group off with `~group`.
`python launch.py plan=true ...` checks everything and prints what would run.
"""
PACKAGE = re.compile(r"# @package (?!_)([\w.]+)\n")
KEY = re.compile(r"^(?P<indent> *)(?P<key>[\w.]+):(?: +(?P<value>.*))?$")


@dataclass(frozen=True)
class Row:
    """One key of a YAML file."""

    key: str  # dotted path inside the file
    value: str
    comment: str


def rows(text: str) -> Iterator[Row]:
    """Keys in file order. The comment is the block of `#` lines right above the key."""
    comment: list[str] = []
    path: list[tuple[int, str]] = []  # (indent, key) of the enclosing mappings
    for line in text.splitlines():
        match = KEY.match(line)
        if match is None:
            is_comment = line.lstrip().startswith("#") and not line.startswith("# @package")
            comment = [*comment, line.lstrip(" #")] if is_comment else []
            continue
        indent = len(match["indent"])
        path = [(depth, key) for depth, key in path if depth < indent]
        name = ".".join([*(key for _, key in path), match["key"]])
        path.append((indent, match["key"]))
        yield Row(name, match["value"] or "", " ".join(comment))
        comment = []


def section(file: Path) -> Iterator[str]:
    """Markdown of one file: title, what it is, a table of its keys."""
    found = list(rows(file.read_text()))
    target = next((row for row in found if row.key == TARGET), None)
    shared = file.parent == CONF
    yield f"### `{file.stem}`" if shared else f"### `{file.parent.name}={file.stem}`"
    yield ""
    if target:
        place = PACKAGE.match(file.read_text())
        where = f"Its keys stand under `{place[1]}`." if place else ""
        yield " ".join(filter(None, [target.comment, f"Class `{target.value}`.", where]))
        yield ""
    whole = RoleConfig if file.parent.name == "critic" else RunConfig
    cls = import_target(target.value, ["rlpost."]).Config if target else whole
    table = [row for row in found if row.key.split(".")[0] not in (TARGET, "defaults")]
    if table:
        yield from ("| key | default | allowed | meaning |", "|---|---|---|---|")
        yield from (table_row(row, allowed(cls, row.key)) for row in table)
        yield ""


def allowed(cls: type[Any], key: str) -> str:
    """What the field's type allows, in words; "" where the type says nothing."""
    part = schema_at(schema(cls), tuple(key.split(".")))
    return describe(schema(cls), part) if part else ""


def table_row(row: Row, allowed: str) -> str:
    value = f"`{escaped(row.value)}`" if row.value else ""
    return f"| `{row.key}` | {value} | {escaped(allowed)} | {escaped(row.comment)} |"


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def reference(conf: Path = CONF) -> str:
    """The whole page."""
    lines = [HEAD, "## Shared keys", "", *section(conf / "config.yaml")]
    for folder in sorted(path for path in conf.iterdir() if path.is_dir()):
        files = sorted(folder.glob("*.yaml"))
        if folder.name in ("recipe", "sweep", "hydra") or not files:
            continue
        lines += [f"## `{folder.name}`", ""]
        for file in files:
            lines += section(file)
    return "\n".join(lines)


def main() -> None:
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(reference())


if __name__ == "__main__":
    main()
