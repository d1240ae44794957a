"""Modules that are imported at first use, so that `--help` and `plan=true` need no torch."""

from __future__ import annotations

import importlib
import sys
import types
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


class Deferred(types.ModuleType):
    """What `import name` finds until an attribute is read: then the library is loaded."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # what the import system asks of any module
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


def defer(name: str) -> None:
    """Lets other libraries `import name` without its cost, for those that import more than needed.

    importlib's own LazyLoader loads at the next `import` statement already (Python 3.11).
    """
    if name not in sys.modules:
        sys.modules[name] = Deferred(name)
