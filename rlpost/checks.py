"""Rules that reach across sections. All are checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlpost.config import RunConfig
from rlpost.errors import ConfigError


def check(config: RunConfig) -> None:
    """Raises ConfigError with every rule that is broken."""
    problems = [line for rule in RULES for line in rule(config)]
    if problems:
        raise ConfigError(problems)


def batch_holds_whole_groups(config: RunConfig) -> Iterator[str]:
    size, group = config.train_batch_size, config.group_size
    if size % group:
        below, above = size // group * group, -(-size // group) * group
        ways = " or ".join(str(way) for way in (below, above) if way)
        yield f"train_batch_size ({size}) must be a multiple of group_size ({group}); try {ways}"


def sections_agree(config: RunConfig) -> Iterator[str]:
    """What a section's Config says about the others: its optional method `conflicts(run)`."""
    for section in config.sections().values():
        conflicts: Any = getattr(section.config, "conflicts", None)
        if conflicts is not None:
            yield from conflicts(config)


RULES = (batch_holds_whole_groups, sections_agree)
