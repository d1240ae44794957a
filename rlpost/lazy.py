"""Modules that are imported at first use, so that `--help` and `plan=true` need no torch."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for module `name` and imports it when an attribute is first read.

    Use it under `TYPE_CHECKING` so that type checkers see the real module:

        if TYPE_CHECKING:
            import torch
        else:
            torch = LazyModule("torch")
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        self.__dict__[attribute] = value
        return value
