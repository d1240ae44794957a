"""Our names and values in the form that MLflow takes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NAME_LENGTH = 250  # MLflow's limits
PARAM_LENGTH = 6000
CUT = "..."  # ends a value that was too long
NOT_ALLOWED = re.compile(r"[^\w\-. :/]")


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys: {"loop": {"colocate": True}} -> {"loop.colocate": True}."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: value} if prefix else {}
    flat: dict[str, Any] = {}
    for key, entry in value.items():
        flat |= flatten(entry, f"{prefix}.{key}" if prefix else str(key))
    return flat


def entity_name(name: str) -> str:
    """`name` as MLflow takes it; of one that is too long the end, which tells most."""
    return NOT_ALLOWED.sub("_", name)[-NAME_LENGTH:]


def param_value(value: Any) -> str:
    """As text; of one that is too long the start."""
    text = str(value)
    return text if len(text) <= PARAM_LENGTH else text[: PARAM_LENGTH - len(CUT)] + CUT
