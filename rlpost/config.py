"""From a composed Hydra node to a frozen, fully checked `RunConfig`; the only user of omegaconf.

Order: overrides -> interpolations -> validation of every section. Derived numbers come later, in
`rlpost.plan`, so no value is ever computed from a default that an override replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, PositiveInt

from rlpost.debug import DebugConfig, limited
from rlpost.errors import ConfigError
from rlpost.objective import ObjectiveConfig
from rlpost.validation import TARGET, Section, Seed, Validator
from rlpost.wording import join, nearest

__all__ = ["RunConfig", "Section", "build", "load", "to_plain"]

Name = Annotated[str, Field(min_length=1, pattern=r"^[^\s/]+$")]


@dataclass(frozen=True)
class RoleConfig:
    """A trainer role with a model and ranks of its own."""

    model: Section
    trainer: Section


@dataclass(frozen=True)
class RunConfig:
    """Everything the user decided. Shared keys first, then one section per config group.

    A group that is switched off (`~engine`, or null in a recipe) is None.
    """

    run_name: Name
    seed: Seed
    group_size: PositiveInt
    train_batch_size: PositiveInt
    num_steps: PositiveInt | None
    num_epochs: PositiveInt | None
    output_dir: str
    resume_from: str | None
    plan: bool
    objective: ObjectiveConfig | None
    stop_sweep_on_failure: bool
    trusted_prefixes: list[str]
    model: Section
    data: Section
    reward: Section | None
    algorithm: Section
    rollout: Section
    engine: Section | None
    trainer: Section
    loop: Section
    weight_sync: Section | None
    cluster: Section
    tracking: dict[str, Section]
    checkpoint: Section
    eval: Section | None
    critic: RoleConfig | None
    teachers: dict[str, RoleConfig]
    distillation: Section | None
    prm: Section | None
    debug: DebugConfig

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.num_epochs is None):
            raise ValueError(
                f"give exactly one of num_steps ({self.num_steps}) and num_epochs "
                f"({self.num_epochs}); set the other to null"
            )

    def plain(self) -> dict[str, Any]:
        """The resolved configuration as plain values, for saving and for trackers."""
        return to_plain(self)  # type: ignore[no-any-return]

    def sections(self) -> dict[str, Section]:
        """The sections that are switched on, by group."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        named |= {f"tracking.{name}": tracker for name, tracker in self.tracking.items()}
        return {name: value for name, value in named.items() if isinstance(value, Section)}


RUN_KEYS = tuple(field.name for field in fields(RunConfig))
OPTIONAL_SECTIONS = ("reward", "engine", "weight_sync", "eval", "distillation", "prm")
OPTIONAL_ROLES = ("critic",)
OPTIONAL_GROUPS = (*OPTIONAL_SECTIONS, *OPTIONAL_ROLES)
REQUIRED_GROUPS = tuple(field.name for field in fields(RunConfig) if field.type == "Section")
ADDED_GROUPS = ("recipe", "sweep")  # chosen with `group=option`; leave no key of their own


def load(node: DictConfig) -> RunConfig:
    """Resolves and validates. Raises ConfigError with every problem of every section."""
    if broken := broken_interpolations(node):
        raise ConfigError(broken)
    problems = [f"{key}: no value given (???); set it: {key}=..." for key in missing_keys(node)]
    values = OmegaConf.to_container(node, resolve=True, throw_on_missing=False)
    assert isinstance(values, dict)
    named = limited({str(key): value for key, value in values.items()})
    named = {**dict.fromkeys(OPTIONAL_GROUPS), "teachers": {}, "tracking": {}, **named}
    problems += trackers_without_name(named)
    problems += unknown_keys(named)
    problems += keys_of_groups_that_are_off(named)
    named = {key: value for key, value in named.items() if key in RUN_KEYS}
    validator = Validator(strings(named.get("trusted_prefixes")))
    config = validator.validate(RunConfig, named)
    problems += validator.problems
    if problems:
        raise ConfigError(problems)
    return config  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SweepConfig:
    """What a sweep needs before its jobs, each with a configuration of its own, are composed."""

    run_name: Name
    plan: bool
    objective: ObjectiveConfig | None
    tracking: dict[str, Section]


def load_sweep(node: DictConfig) -> SweepConfig:
    """Reads only these keys: others may have no value but in the jobs. Raises ConfigError."""
    named = {"tracking": {}} | {
        field.name: plain_value(node[field.name])
        for field in fields(SweepConfig)
        if field.name in node
    }
    validator = Validator(strings(plain_value(node.trusted_prefixes)))
    settings = validator.validate(SweepConfig, named)
    if validator.problems:
        raise ConfigError(validator.problems)
    return settings  # type: ignore[no-any-return]


def keys_of_groups_that_are_off(named: dict[str, Any]) -> list[str]:
    """A recipe's keys for a group that was switched off would be ignored: say so; turn it off."""
    problems = []
    for group in OPTIONAL_GROUPS:
        node = named[group]
        if isinstance(node, dict) and not has_option(group, node):
            named[group] = None
            if node:
                ways = " ".join(f"~{group}.{key}" for key in node)
                problems.append(
                    f"{group}: {', '.join(map(str, node))} set, but no option of the group is "
                    f"chosen; choose {group}=<option>, or take the keys out too: {ways}"
                )
    return problems


def has_option(group: str, node: dict[str, Any]) -> bool:
    """Whether an option of the group is chosen: it names a class, a role's trainer names one."""
    named = node.get("trainer") if group in OPTIONAL_ROLES else node
    return isinstance(named, dict) and TARGET in named


def trackers_without_name(named: dict[str, Any]) -> list[str]:
    """Each option of `tracking` puts its keys under a name of its own, so that many can be on."""
    node = named["tracking"]
    if not isinstance(node, dict) or TARGET not in node:
        return []
    named["tracking"] = {}
    return [
        f"tracking: {node[TARGET]} stands beside the trackers' names; begin its file with "
        "'# @package tracking.<name>'"
    ]


def plain_value(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def strings(value: Any) -> list[str]:
    """The strings in a list; anything else is reported when the key itself is validated."""
    items = value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, str)]


def build(section: Section, **context: Any) -> Any:
    """The section's object: `target(config, **context)`."""
    return section.target(section.config, **context)


def to_plain(value: Any) -> Any:
    """Dataclasses and sections as dicts with `_target_`; the inverse of validation."""
    if isinstance(value, Section):
        name = f"{value.target.__module__}.{value.target.__qualname__}"
        return {TARGET: name, **to_plain(value.config)}
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def unknown_keys(values: Iterable[str]) -> list[str]:
    return [
        f"{key}: unknown key or group{nearest(key, [*RUN_KEYS, *ADDED_GROUPS])}; "
        f"valid: {', '.join([*RUN_KEYS, *ADDED_GROUPS])}"
        for key in values
        if key not in RUN_KEYS
    ]


def missing_keys(node: DictConfig) -> list[str]:
    return sorted(OmegaConf.missing_keys(node))


def broken_interpolations(node: Any, path: str = "") -> list[str]:
    """One line per value whose `${...}` can't be resolved."""
    lines = []
    for key, child in children(node):
        where = join(path, key)
        try:
            value = node[key] if not OmegaConf.is_missing(node, key) else None
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            lines.append(f"{where}: interpolation {child!r} can't be resolved: {reason}")
            continue
        if OmegaConf.is_config(value):
            lines += broken_interpolations(value, where)
    return lines


def children(node: Any) -> Iterator[tuple[str | int, Any]]:
    raw = OmegaConf.to_container(node, resolve=False)
    yield from raw.items() if isinstance(raw, dict) else enumerate(raw)  # type: ignore


def key_paths(node: Any, path: str = "") -> list[str]:
    """Every key of a node as a dotted path, inner nodes included."""
    paths = []
    for key, value in children(node):
        where = join(path, key)
        paths.append(where)
        if isinstance(value, dict):
            paths += key_paths(OmegaConf.create(value), where)
    return paths
