"""The command line as Hydra gets it."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence


def recipe_in_its_place(arguments: Sequence[str]) -> list[str]:
    """`+recipe=x` is `recipe=x`: Hydra would append it, so that it came after `debug`."""
    return [
        argument.removeprefix("+") if is_recipe(argument) else argument for argument in arguments
    ]


def completed_in_its_place(environ: MutableMapping[str, str]) -> None:
    """The same for the line that a shell completes, up to its last word, which keeps its `+`."""
    if "COMP_LINE" not in environ or "COMP_POINT" not in environ:
        return
    typed = environ["COMP_LINE"][: int(environ["COMP_POINT"])]
    words, gap, last = typed.rpartition(" ")
    line = " ".join(recipe_in_its_place(words.split(" "))) + gap + last
    environ.update(COMP_LINE=line, COMP_POINT=str(len(line)))


def is_recipe(argument: str) -> bool:
    return argument.startswith("+recipe=")
