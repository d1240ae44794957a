"""Ways to look into a run: the shared key `debug`, which the options of the group `debug` set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlpost.profiling import ProfileConfig
from rlpost.wording import join

ANY_NAME = "*"


@dataclass(frozen=True)
class DebugConfig:
    """`only` runs one half of each step; `limits` are values of keys, as a tree of keys."""

    limits: dict[str, Any]
    command_line: list[str]
    small_models: bool
    only: Literal["rollout", "train"] | None
    samples_from: str | None
    profile: ProfileConfig | None

    def __post_init__(self) -> None:
        if self.only == "train" and self.samples_from is None:
            raise ValueError(
                "samples_from (null) must name the folder of the run whose samples are trained "
                "on: debug.samples_from=outputs/<run>/<time>"
            )
        if self.only != "train" and self.samples_from is not None:
            raise ValueError(
                f"samples_from ({self.samples_from!r}) is read by debug=train_only alone; choose "
                "it, or set samples_from to null"
            )


def limited(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, its keys within `debug.limits`; what the command line sets is kept."""
    debug = values.get("debug")
    if not isinstance(debug, Mapping) or not isinstance(debug.get("limits"), Mapping):
        return dict(values)  # validation says what is wrong with it
    kept = set_keys([str(item) for item in debug.get("command_line") or ()])
    return {**within(values, debug["limits"], kept), "debug": debug}


def set_keys(command_line: Sequence[str]) -> frozenset[str]:
    """["+recipe=x", "eval.interval=5"] -> {"recipe", "eval.interval"}"""
    return frozenset(item.lstrip("+~").partition("=")[0] for item in command_line)


def within(
    values: Mapping[str, Any], limits: Mapping[str, Any], kept: frozenset[str], path: str = ""
) -> dict[str, Any]:
    changed = dict(values)
    for key, limit in matching(values, limits):
        where, value = join(path, key), values[key]
        if isinstance(limit, Mapping) and isinstance(value, Mapping):
            changed[key] = within(value, limit, kept, where)
        elif not isinstance(limit, Mapping) and where not in kept:
            changed[key] = smaller(value, limit)
    return changed


def matching(values: Mapping[str, Any], limits: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys that are there, each with its limit; `*` is for all names."""
    for name, limit in limits.items():
        yield from ((key, limit) for key in values if name in (key, ANY_NAME))


def smaller(value: Any, limit: Any) -> Any:
    """The smaller number. A limit that is no number, or a value that is none, gives the limit."""
    return min(value, limit) if is_number(value) and is_number(limit) else limit


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
