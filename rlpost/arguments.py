"""The command line as Hydra gets it."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

# Hydra's flags that the next word belongs to, and those where it may.
SHORT = ("-c", "-p", "-cp", "-cn", "-cd")
LONG = ("--cfg", "--package", "--config-path", "--config-name", "--config-dir")
WITH_A_VALUE = (*SHORT, *LONG, "--experimental-rerun")
MAYBE_WITH_A_VALUE = ("-i", "--info")


def as_hydra_takes_it(arguments: Sequence[str]) -> list[str]:
    return flags_first(recipe_in_its_place(arguments))


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Hydra's parser knows no override that follows a flag which follows one: `a=1 -m b=2`."""
    flags: list[str] = []
    overrides: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        of_flag = before in WITH_A_VALUE or (before in MAYBE_WITH_A_VALUE and "=" not in argument)
        (flags if of_flag or argument.startswith("-") else overrides).append(argument)
    return flags + overrides


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
