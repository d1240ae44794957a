"""Says everything that is wrong with a command line, also where Hydra stops at the first fault.

Each override by itself: can it be read, and is its group, option or key known, and if not, which
valid name is nearest? What is left is then composed and checked as a run's configuration is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException, OverrideParseException

from rlpost.checks import check
from rlpost.composition import CONF, SEARCH_PATH, SearchPath, compose_node
from rlpost.config import REQUIRED_GROUPS, key_paths, load
from rlpost.errors import ConfigError, RlpostError
from rlpost.option_files import default_groups, is_global, options_by_group, options_with
from rlpost.search_path import search_path
from rlpost.wording import nearest_name, unknown

SWEEPS = re.compile(r"\+?sweep=|hydra\.mode=")  # what makes a sweep, beside -m
GLOBAL_CHOICE = "*"  # among the obscure groups: any key may come from it

__all__ = ["CONF", "compose_node", "explain", "with_the_rest"]


def explain(error: Exception, arguments: Sequence[str]) -> str:
    """Every fault of the command line; Hydra's own message where none is found."""
    line = CommandLine(arguments)
    if not line.problems:
        return f"command line: {str(error).partition('Config search path:')[0].rstrip()}"
    return str(ConfigError([*line.problems, *line.problems_of_the_rest()]))


def with_the_rest(error: ConfigError, arguments: Sequence[str]) -> ConfigError:
    """`error`, and what is wrong beside the overrides that it is about: load stops before check."""
    line = CommandLine(arguments)
    if line.problems or line.multirun:
        more = line.without_the_left_out(error.problems)
        return ConfigError(list(dict.fromkeys([*line.problems, *more])))
    if not line.overrides:
        return error
    for override in line.overrides:
        if any(mentions(problem, override) for problem in error.problems):
            line.leave_out(override)
    more = [item for item in line.problems_of_the_rest() if item not in error.problems]
    return ConfigError([*error.problems, *more])


class CommandLine:
    """The overrides of a command line and what is wrong with each of them.

    A wrong option is taken for the nearest one when the rest is looked at, and so are the keys
    that it would bring; without a near one nothing can be said about those.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        given, _ = get_args_parser().parse_known_args(list(arguments))
        # What a pickle of Hydra's holds only Hydra can tell.
        overrides = [] if given.experimental_rerun else given.overrides
        self.multirun = bool(given.multirun) or any(map(SWEEPS.match, overrides))
        self.problems: list[str] = []
        self.overrides: list[Override] = []
        self._kept: list[str] = []  # as they are composed
        self._left_out: list[Override] = []
        self._obscure: list[str] = []  # groups whose keys are not known
        self._parse(overrides)
        self.path, problems = search_path(given, self._listed_folders())
        self.problems += problems
        self._groups = options_by_group(self.path.folders)
        choices = [item for item in self.overrides if self._is_choice(item)]
        for override in choices:
            self._look_at_choice(override)
        self._look_at_keys([item for item in self.overrides if not self._is_choice(item)])

    def problems_of_the_rest(self) -> list[str]:
        """What load and check say of the overrides that are right by themselves."""
        if self._obscure or self.multirun:
            return []
        try:
            check(load(compose_node(self._kept, self.path)))
        except ConfigError as error:
            return self.without_the_left_out(error.problems)
        except (HydraException, RlpostError, ValueError):
            return []  # reported when the faults above are mended
        return []

    def without_the_left_out(self, problems: Sequence[str]) -> list[str]:
        """Without those of overrides that have a line of their own already."""
        return [
            problem
            for problem in problems
            if not any(mentions(problem, override) for override in self._left_out)
        ]

    def leave_out(self, override: Override) -> None:
        self._left_out.append(override)
        self._kept = [text for text in self._kept if text != str(override.input_line)]

    # -- one override after another ------------------------------------------------------------

    def _parse(self, overrides: Sequence[str]) -> None:
        parser = OverridesParser.create()
        for text in overrides:
            try:
                self.overrides += parser.parse_overrides([text])
            except OverrideParseException as error:
                reason = error.message.splitlines()[0] if error.message else "not key=value"
                way = "" if "=" in text else f"; write {text}=<value>, or ~{text} to take it out"
                self.problems.append(f"can't read the override {text!r}: {reason}{way}")

    def _listed_folders(self) -> list[Any]:
        """Those of `hydra.searchpath`, which then stand in the path and no longer in the line."""
        listed = [item for item in self.overrides if name_of(item) == SEARCH_PATH]
        self.overrides = [item for item in self.overrides if item not in listed]
        values = [item.value() for item in listed]
        self.problems += [
            f"{override.input_line}: a list belongs here: {SEARCH_PATH}=[{value}]"
            for override, value in zip(listed, values, strict=True)
            if not isinstance(value, list)
        ]
        return [
            item for value in values for item in (value if isinstance(value, list) else [value])
        ]

    def _is_choice(self, override: Override) -> bool:
        name = name_of(override)
        return name in self._groups or name.startswith("hydra/")

    def _look_at_choice(self, override: Override) -> None:
        group, text = name_of(override), str(override.input_line)
        if override.is_delete() and group not in REQUIRED_GROUPS:
            self._kept.append(text)
            return
        options = self._options(group)
        values = [None] if override.is_delete() else chosen(override, options)
        problem = self._problem_of_choice(override, values, options)
        if problem is None:
            self._kept.append(for_one_job(override, options))
            return
        self.problems.append(f"{text}: {problem}")
        stand_in = nearest_name(values[0], options) if values else None
        if values == [None]:
            stand_in = None
            self._left_out.append(override)
        elif stand_in is None:
            self._obscure.append(GLOBAL_CHOICE if is_global(group, self.path.folders) else group)
        else:
            key = override.get_key_element()
            placed = group in self._placed_groups() and override.package is None
            self._kept.append(f"{key.lstrip('+') if placed else key}={stand_in}")

    def _problem_of_choice(
        self, override: Override, values: list[Any], options: list[str]
    ) -> str | None:
        group = name_of(override)
        if values == [None] and group in REQUIRED_GROUPS:
            return f"a run needs one; choose {group}=<option>: {', '.join(options)}"
        if values == [None]:
            return f"write ~{group} to switch the group off"
        if not values:
            return f"fits no option; valid: {', '.join(options)}"
        for item in values:
            if isinstance(item, str) and item not in options:
                return unknown(item, options)
        if override.is_add() and override.package is None and group in self._placed_groups():
            return "the group has its place already: leave the + out"
        return self._stray_sweep(override)

    def _placed_groups(self) -> list[str]:
        return default_groups(self.path.primary) if self.path.primary.is_file() else []

    def _stray_sweep(self, override: Override) -> str | None:
        if isinstance(override.value(), Glob) and not self._is_choice(override):
            return "glob chooses among the options of a group; list values"
        if override.is_sweep_override() and not self.multirun:
            return "several values are a sweep: add -m; a list is written [a,b]"
        return None

    def _options(self, group: str) -> list[str]:
        if not group.startswith("hydra/"):
            return self._groups[group]
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(CONF), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            return list(loader.get_group_options(group))

    def _look_at_keys(self, overrides: Sequence[Override]) -> None:
        keys = [] if GLOBAL_CHOICE in self._obscure else known_keys(self._kept, self.path)
        added = tuple(name_of(item) for item in overrides if item.is_add() or item.is_force_add())
        below = (*(f"{name}." for name in added), "hydra.sweeper.params.")
        for override in overrides:
            name, text = name_of(override), str(override.input_line)
            problem = self._stray_sweep(override) or self._choice_without_options(override)
            if problem is None and keys and name not in (*keys, *added):
                hidden = name.partition(".")[0] in self._obscure or name.startswith(below)
                problem = None if hidden else self._unknown_key(name, keys)
            if problem is None:
                self._kept.append(for_one_job(override))
            else:
                self.problems.append(f"{text}: {problem}")
                self._left_out.append(override)

    def _choice_without_options(self, override: Override) -> str | None:
        """A saved run is one file: it has a group's keys, and none of its options."""
        group, saved = name_of(override), self.path.primary
        if override.is_delete() or saved.is_relative_to(CONF) or not (CONF / group).is_dir():
            return None
        if not all(isinstance(item, str) for item in chosen(override)):
            return None
        return f"{saved} has no options to choose from; set its keys: {group}.<key>=..."

    def _unknown_key(self, name: str, keys: Sequence[str]) -> str:
        if elsewhere := options_with(name, self.path.folders):
            return f"unknown name; it belongs to {' or '.join(elsewhere)}"
        visible = [key for key in keys if not key.startswith("hydra") or name.startswith("hydra")]
        return unknown(name, [*visible, *self._groups])


def mentions(problem: str, override: Override) -> bool:
    """Whether a problem names the override's key: the whole, or its last part as sections do."""
    name = name_of(override)
    names = {name, name.rpartition(".")[2]}
    problem = problem.partition("; did you mean")[0].partition("; valid")[0]  # what is at fault
    return any(re.search(rf"(?<![\w.]){re.escape(item)}(?![\w.]\w)", problem) for item in names)


def name_of(override: Override) -> str:
    """The group or key, without `+`, `~` and a leading slash."""
    return (override.key_or_group or "").lstrip("/")


def chosen(override: Override, options: Sequence[str] = ()) -> list[Any]:
    """One option, all of a list, or each of a sweep's; of a glob those of `options` that fit."""
    value: Any = override.value()
    if isinstance(value, Glob):
        return list(value.filter(list(options)))
    if override.is_discrete_sweep():
        return list(override.sweep_iterator())
    return value if isinstance(value, list) else [value]


def for_one_job(override: Override, options: Sequence[str] = ()) -> str:
    """The override as the first job of a sweep has it."""
    if not override.is_discrete_sweep():
        return str(override.input_line)
    if isinstance(override.value(), Glob):
        return f"{override.get_key_element()}={chosen(override, options)[0]}"
    return f"{override.get_key_element()}={next(override.sweep_string_iterator())}"


def known_keys(choices: Sequence[str], path: SearchPath) -> list[str]:
    """Keys of the configuration with these group choices; none if the groups don't compose."""
    try:
        keys = key_paths(compose_node(choices, path))
    except (HydraException, ValueError):
        return []
    return [*keys, *key_paths(HydraConfig.instance().cfg)]
