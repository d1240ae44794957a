"""Picking the part that counts out of a text: the answer of a response, a judge's verdict."""

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
    """Also raises ValueError when several groups could be what counts."""
    groups = require_pattern(key, pattern).groups
    if groups > 1:
        raise ValueError(
            f"{key} ({pattern!r}) has {groups} groups; mark what counts with one group and "
            "write the others as (?:...)"
        )


def last_match(pattern: str, text: str) -> str | None:
    """Group 1 (or the whole) of the pattern's last match, stripped; None without a match, and where
    the group is optional and absent."""
    found = None
    for found in re.finditer(pattern, text):  # noqa: B007
        pass
    part = None if found is None else found.group(found.re.groups)
    return None if part is None else str(part).strip()


Pattern = Annotated[str, Field(min_length=1)]
