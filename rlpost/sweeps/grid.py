"""What the jobs of a sweep differ in, and what is wrong with any of them before one starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from rlpost.checks import check
from rlpost.composition import jobs_of, load_chosen
from rlpost.errors import ConfigError

LOOKED_AT = 64  # jobs, a fifth of a second each


def parsed(
    params: Mapping[str, Any], line: Sequence[str], loader: ConfigLoader | None
) -> list[Override]:
    """Overrides of the sweeper's `params` and of the command line, which come after them.

    `loader` knows the options that a glob means.
    """
    texts = [f"{key}={value}" for key, value in params.items()]
    overrides = OverridesParser.create(loader).parse_overrides([*texts, *line])
    return list({override.get_key_element(): override for override in overrides}.values())


def varied_keys(overrides: Iterable[Override]) -> list[str]:
    """Keys and groups that have more than one value, or a range."""
    return [item.get_key_element().lstrip("+") for item in overrides if item.is_sweep_override()]


def combinations(overrides: Sequence[Override]) -> list[list[str]]:
    """The overrides of each job, as Hydra's own sweeper makes the grid. Raises ConfigError."""
    ranges = [
        item for item in overrides if item.is_sweep_override() and not item.is_discrete_sweep()
    ]
    if ranges:
        way = "a range is for a search: list values, or add hydra/sweeper=optuna"
        raise ConfigError([f"{item.input_line}: {way}" for item in ranges])
    (jobs,) = BasicSweeper.split_arguments(list(overrides), None)
    if not jobs:
        raise HydraException("the sweep has no jobs")
    return jobs


def check_jobs(sweep: DictConfig, jobs: Sequence[Sequence[str]]) -> None:
    """Raises ConfigError with the problems of all jobs, or of the first `LOOKED_AT`."""
    first = jobs[:LOOKED_AT]
    if len(jobs) > len(first):
        print(f"the first {len(first)} of {len(jobs)} jobs are checked before the sweep begins")
    found: dict[str, list[int]] = {}
    for number, node in enumerate(jobs_of(sweep, first)):
        for problem in problems_of(node):
            found.setdefault(problem, []).append(number)
    if found:
        raise ConfigError(
            [f"{whose(numbers, first)}{problem}" for problem, numbers in found.items()]
        )


def problems_of(node: DictConfig) -> list[str]:
    try:
        check(load_chosen(node), compared=True)
    except ConfigError as error:
        return error.problems
    return []


def whose(numbers: Sequence[int], jobs: Sequence[Sequence[str]]) -> str:
    """`with seed=x: `, by what the jobs with a problem have in common; "" where it is of all."""
    if len(numbers) == len(jobs):
        return ""
    others = {item for number, job in enumerate(jobs) if number not in numbers for item in job}
    shared = [item for item in jobs[numbers[0]] if all(item in jobs[number] for number in numbers)]
    own = [item for item in shared if item not in others]
    first = [item for item in jobs[numbers[0]] if not all(item in job for job in jobs)]
    more = "" if own or len(numbers) == 1 else f", and in {len(numbers) - 1} more jobs"
    return f"with {' '.join(own or first)}{more}: "
