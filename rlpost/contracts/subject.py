"""The class under check: its import, its Config, and the values it is built from."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlpost.composition import CONF
from rlpost.contracts.report import Finding, point, require
from rlpost.validation import TARGET, Section, Validator


@dataclass
class Subject:
    """Filled while its points are checked; `ready` once all of them are kept."""

    path: str
    values: Mapping[str, Any]
    target: Any = None
    section: Section | None = None
    ready: bool = False

    def findings(self) -> Iterator[Finding]:
        """Stops at the first point that is not kept, since the next ones need it."""
        for name, check in (
            ("can be imported", self._import),
            ("has a Config", self._has_config),
            ("Config is a frozen dataclass", self._is_frozen),
            ("Config has no defaults", self._has_no_defaults),
            ("Config takes the values", self._takes_values),
            ("can be sent to another process", self._can_be_pickled),
        ):
            finding = point(name, check)
            yield finding
            if finding.problem:
                return
        self.ready = True

    def _import(self) -> None:
        module_name, _, name = self.path.rpartition(".")
        require(module_name, f"{self.path!r} is no dotted path such as my_package.rewards.Mine")
        module = importlib.import_module(module_name)
        classes = [key for key, value in vars(module).items() if hasattr(value, "Config")]
        require(
            hasattr(module, name),
            f"module {module_name} has no {name!r}; classes with a Config there: "
            f"{', '.join(classes) or 'none'}",
        )
        self.target = getattr(module, name)
        require(isinstance(self.target, type), f"{self.path} is no class")

    def _has_config(self) -> None:
        name = self.target.__name__
        require(
            isinstance(getattr(self.target, "Config", None), type),
            f"write a frozen dataclass {name}Config above the class and `Config = {name}Config` "
            "in it",
        )

    def _is_frozen(self) -> None:
        config = self.target.Config
        require(
            dataclasses.is_dataclass(config),
            f"put @dataclass(frozen=True) above {config.__name__}",
        )
        require(
            config.__dataclass_params__.frozen,
            f"{config.__name__} can be changed; write @dataclass(frozen=True)",
        )

    def _has_no_defaults(self) -> None:
        found = [
            field.name
            for field in dataclasses.fields(self.target.Config)
            if field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        ]
        require(
            not found,
            f"{', '.join(found)} {'has' if len(found) == 1 else 'have'} one; write the value into "
            "the YAML file instead",
        )

    def _takes_values(self) -> str:
        validator = Validator([""])
        values = {**(values_in_conf(self.path) or {}), **self.values}
        config = validator.validate(self.target.Config, values)
        problems = "; ".join(validator.problems)
        require(not problems, f"{problems} (give values with --config key=value or --yaml FILE)")
        self.section = Section("checked", self.target, config)
        return ", ".join(f"{key}={value}" for key, value in values.items())

    def _can_be_pickled(self) -> None:
        try:
            copy = pickle.loads(pickle.dumps(self.section))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            require(False, f"{error}; define the class at the top of a module")
        require(copy == self.section, "its Config is not equal to a copy of itself")


def values_in_conf(path: str, folders: Sequence[Path] = (CONF, Path("conf"))) -> Any:
    """What a file under conf/ gives the class; None if none names it."""
    files = [file for folder in folders for file in sorted(folder.rglob("*.yaml"))]
    for file in files:
        for node in nodes(yaml.safe_load(file.read_text())):
            if node.get(TARGET) == path:
                return without_target(node)
    return None


def values_in_file(path: str, file: Path) -> Mapping[str, Any]:
    """Of the node that names the class, or of the whole file. Raises ValueError."""
    tree = yaml.safe_load(file.read_text())
    if not isinstance(tree, dict):
        raise ValueError(f"{file} holds no keys")
    found = [node for node in nodes(tree) if node.get(TARGET) == path]
    return without_target(found[0] if found else tree)


def nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(tree, Mapping):
        yield tree
        for value in tree.values():
            yield from nodes(value)


def without_target(node: Mapping[str, Any]) -> dict[str, Any]:
    """Values that stand for others (`${...}`, `???`) are left to be given."""
    return {
        key: value
        for key, value in node.items()
        if key not in (TARGET, "defaults") and not (isinstance(value, str) and unknown(value))
    }


def unknown(value: str) -> bool:
    return "${" in value or value == "???"
