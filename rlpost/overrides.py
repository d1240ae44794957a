"""Explains override errors that Hydra raises before the configuration exists.

For each override: is its group, option or key known, and if not, which valid name is nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, open_dict

from rlpost.config import key_paths
from rlpost.wording import nearest

CONF = Path(__file__).parent.parent / "conf"


def explain(error: HydraException, arguments: Sequence[str], conf: Path = CONF) -> str:
    """Hydra's message, after a line for each override that names something unknown."""
    if isinstance(error, OverrideParseException):
        return f"can't read the override {error.override!r}: {error.message}"
    overrides = OverridesParser.create().parse_overrides(
        get_args_parser().parse_known_args(list(arguments))[0].overrides
    )
    found = unknown_names(overrides, conf)
    return "\n  - ".join(["command line:", *found]) if found else f"command line: {error}"


def unknown_names(overrides: Iterable[Override], conf: Path = CONF) -> list[str]:
    """One line per override whose group, option or key does not exist."""
    groups = options_by_group(conf)
    lines, valid, others = [], [], []
    for override in overrides:
        name = (override.key_or_group or "").lstrip("/")
        if name not in groups:
            others.append((name, override))
            continue
        value = override.value()
        chosen = value if isinstance(value, list) else [value]
        bad = [item for item in chosen if isinstance(item, str) and item not in groups[name]]
        lines += [unknown(f"{name}={item}", item, groups[name]) for item in bad]
        if not bad:
            valid.append(override.input_line or "")
    keys = known_keys(valid, conf)
    if not keys:
        return lines
    for name, override in others:
        if not name.startswith("hydra") and name not in keys and not override.is_force_add():
            lines.append(unknown(str(override.input_line), name, [*groups, *keys]))
    return lines


def known_keys(overrides: Sequence[str], conf: Path) -> list[str]:
    """Keys of the configuration with these group choices; none if the groups don't compose."""
    try:
        return key_paths(compose_node(overrides, conf))
    except HydraException:
        return []


def unknown(given: str, name: str, names: Sequence[str]) -> str:
    """`trainer.lrr=1: unknown name; did you mean 'trainer.lr'?`; without a match, what is there."""
    hint = nearest(name, names)
    if not hint:
        parent = name.rpartition(".")[0]
        near = [item for item in names if item.rpartition(".")[0] == parent]
        hint = f"; valid: {', '.join(near or names)}"
    return f"{given}: unknown name{hint}"


def options_by_group(conf: Path) -> dict[str, list[str]]:
    """{"algorithm": ["grpo", ...], "hydra/launcher": [...]}"""
    folders = sorted(path for path in conf.rglob("*") if path.is_dir())
    return {
        folder.relative_to(conf).as_posix(): sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in folders
    }


def compose_node(overrides: Sequence[str], conf: Path = CONF) -> DictConfig:
    """The composed configuration for these overrides, outside a Hydra application."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf), version_base="1.3"):
        node = compose("config", overrides=list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(node)  # `${hydra:...}` is looked up there
    with open_dict(node):
        del node["hydra"]
    return node
