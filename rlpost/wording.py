"""Turns pydantic's errors and schemas into the words a user needs: what is allowed, and where."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import ErrorDetails

MISSING = "???"
Location = tuple[str | int, ...]


def adapter(cls: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def schema(cls: type[Any]) -> dict[str, Any]:
    return adapter(cls).json_schema()


def describe_errors(
    cls: type[Any], errors: Iterable[ErrorDetails], node: Any, path: str
) -> list[str]:
    """One line per place: full key path, value received, what is allowed, nearest name."""
    lines: dict[str, str] = {}
    for error in errors:
        location = trim(error, node)
        where = join(path, *location)
        if error["input"] == MISSING or where in lines:
            continue  # reported as having no value; or another branch of the same union
        lines[where] = f"{where or 'configuration'}: {explain(cls, error, location)}"
    return list(lines.values())


def explain(cls: type[Any], error: ErrorDetails, location: Location) -> str:
    kind, value = error["type"], error["input"]
    field = schema_at(schema(cls), location)
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "unexpected_keyword_argument":
        parent = schema_at(schema(cls), location[:-1])
        names = list((parent or {}).get("properties", {}))
        return f"unknown key{nearest(location[-1], names)}; valid here: {', '.join(names)}"
    allowed = (
        describe(schema(cls), field) if field else error["msg"].replace("Input should be ", "")
    )
    if kind in ("missing", "missing_argument"):
        return f"missing; allowed: {allowed}"
    hint = nearest(value, (field or {}).get("enum", ())) if isinstance(value, str) else ""
    if is_number(value) and kind.startswith(("int", "float")):
        hint = "; it is a string: remove the quotes"
    elif isinstance(value, str) and not hint:
        hint = unit(str(location[-1])) if location else ""
    return f"got {value!r}; allowed: {allowed}{hint}"


def trim(error: ErrorDetails, node: Any) -> Location:
    """The error's location without pydantic's own steps (union branches, validators)."""
    location: list[str | int] = []
    for step in error["loc"]:
        known = isinstance(node, Mapping) and step in node
        if known or (isinstance(node, list) and isinstance(step, int) and step < len(node)):
            location.append(step)
            node = node[step]
        elif step == error["loc"][-1] and error["type"].startswith("missing"):
            location.append(step)
    return tuple(location)


def schema_at(root: Mapping[str, Any], location: Location) -> dict[str, Any] | None:
    """The JSON schema of the value at `location`, or None where the schema says nothing."""
    current: Any = resolve(root, root)
    for step in location:
        branches = [resolve(root, branch) for branch in current.get("anyOf", [current])]
        key = "items" if isinstance(step, int) else "additionalProperties"
        found = [branch.get("properties", {}).get(step) or branch.get(key) for branch in branches]
        current = next((item for item in found if isinstance(item, Mapping)), None)
        if current is None:
            return None
        current = resolve(root, current)
    return current  # type: ignore[no-any-return]


def resolve(root: Mapping[str, Any], part: Mapping[str, Any]) -> Any:
    reference = part.get("$ref")
    return root["$defs"][reference.removeprefix("#/$defs/")] if reference else part


UNITS = {"_s": "seconds", "_bytes": "bytes", "_tokens": "tokens"}


def unit(key: str) -> str:
    """`, in seconds` for a key that ends in `_s`: the number is written without its unit."""
    return next((f", in {name}" for end, name in UNITS.items() if key.endswith(end)), "")


BOUNDS = {
    "exclusiveMinimum": ">",
    "minimum": ">=",
    "exclusiveMaximum": "<",
    "maximum": "<=",
    "minLength": "length >=",
    "maxLength": "length <=",
    "minItems": "items >=",
    "maxItems": "items <=",
    "pattern": "matching",
}
TYPES = {"boolean": "true or false", "object": "mapping", "array": "list"}


def describe(root: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """What a JSON schema allows, in words: `number > 0`, `'a' or 'b'`, `integer >= 1 or null`."""
    part = resolve(root, part)
    if "anyOf" in part:
        return " or ".join(describe(root, branch) for branch in part["anyOf"])
    if "enum" in part or "const" in part:
        return " or ".join(repr(value) for value in part.get("enum", [part.get("const")]))
    words = [TYPES.get(part.get("type", ""), part.get("type", "any value"))]
    inner = part.get("items") or part.get("additionalProperties")
    if isinstance(inner, Mapping):
        words.append(f"of {describe(root, inner)}")
    bounds = [f"{sign} {part[key]}" for key, sign in BOUNDS.items() if key in part]
    return " ".join([*words, " and ".join(bounds)]).strip()


def is_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and float(value) is not None
    except ValueError:
        return False


def nearest(name: Any, names: Iterable[str]) -> str:
    """`; did you mean 'lr'?`, or nothing when no name is close."""
    match = nearest_name(name, names)
    return f"; did you mean {match!r}?" if match is not None else ""


def nearest_name(name: Any, names: Iterable[str]) -> str | None:
    matches = difflib.get_close_matches(str(name), [str(item) for item in names], n=1)
    return matches[0] if matches else None


def unknown(name: str, names: Sequence[str]) -> str:
    """`unknown name; did you mean 'trainer.optimizer.lr'?`; without a match, what is there.

    The same last part elsewhere comes first, then the names beside it, then any that look alike.
    """
    unique = list(dict.fromkeys(names))
    parent, _, leaf = name.rpartition(".")
    same_leaf = [item for item in unique if item.rpartition(".")[2] == leaf and "." in item]
    if same_leaf:
        return f"unknown name; did you mean {closest(name, same_leaf)!r}?"
    beside = [item for item in unique if item.rpartition(".")[0] == parent]
    within = [item for item in beside if leaf in item.rpartition(".")[2]]
    hint = f"; did you mean {within[0]!r}?" if len(within) == 1 else nearest(name, beside)
    if not hint and parent not in unique:  # else its section is right, so others would mislead
        hint = nearest(name, unique)
    if not hint and parent in unique and not beside:
        return f"unknown name; {parent} holds no keys"
    sections = [item for item in unique if "." not in item]
    return "unknown name" + (hint or f"; valid: {', '.join(beside or sections)}")


def closest(name: str, names: Sequence[str]) -> str:
    """The one that shares the longest start with `name`, then the shortest."""

    def shared(item: str) -> int:
        pairs = zip(item, name, strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(item), len(name)))

    return min(names, key=lambda item: (-shared(item), len(item)))


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Key -> its last part; the whole where two would be the same, or `@` says which it is.

    {"trainer.optimizer.lr": "lr", "data.size": "data.size", "eval.data.size": "eval.data.size"}
    """
    known = list(dict.fromkeys(keys))
    last = {key: key.rpartition(".")[2] for key in known}
    twice = {name for name in last.values() if list(last.values()).count(name) > 1}
    return {key: key if name in twice or "@" in key else name for key, name in last.items()}


def join(*parts: str | int) -> str:
    return ".".join(str(part) for part in parts if part != "")
