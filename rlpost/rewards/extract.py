"""Picking the answer out of a response."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field


def require_pattern(key: str, pattern: str) -> re.Pattern[str]:
    """Raises ValueError for text that is not a regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{key} ({pattern!r}) is not a regular expression: {error}") from error


def require_answer_pattern(key: str, pattern: str) -> None:
    """Also raises ValueError when several groups could be the answer."""
    groups = require_pattern(key, pattern).groups
    if groups > 1:
        raise ValueError(
            f"{key} ({pattern!r}) has {groups} groups; mark the answer with one group and "
            "write the others as (?:...)"
        )


def last_match(pattern: str, response: str) -> str | None:
    """Group 1 (or the whole) of the pattern's last match, stripped; None without a match."""
    found = None
    for found in re.finditer(pattern, response):  # noqa: B007
        pass
    return None if found is None else found.group(found.re.groups).strip()


Pattern = Annotated[str, Field(min_length=1)]
