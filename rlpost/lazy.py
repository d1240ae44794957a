"""Modules that are imported at first use, so that `--help` and `plan=true` need no torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
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


def defer(name: str) -> None:
    """Lets libraries `import name` without cost: it is loaded when one of its attributes is read.

    For a library that imports more than is needed. Nothing happens if it is loaded or not there.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    loader = importlib.util.LazyLoader(spec.loader)
    spec.loader = loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
