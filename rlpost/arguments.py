"""The command line as Hydra gets it."""

from __future__ import annotations

from collections.abc import Sequence


def recipe_in_its_place(arguments: Sequence[str]) -> list[str]:
    """`+recipe=x` is `recipe=x`: Hydra would append it, so that it came after `debug`."""
    return [
        argument.removeprefix("+") if is_recipe(argument) else argument for argument in arguments
    ]


def is_recipe(argument: str) -> bool:
    return argument.startswith("+recipe=")
