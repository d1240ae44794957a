"""Where a command line takes its configuration from: its flags, and `hydra.searchpath`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlpost.composition import CONF, SEARCH_PATH, SearchPath, not_there


def search_path(flags: Namespace, listed: Sequence[Any]) -> tuple[SearchPath, list[str]]:
    """`listed` are the values of `hydra.searchpath`. The path without what is not there, which
    the problems name."""
    problems: list[str] = []
    first = CONF
    if flags.config_path is not None:
        first = folder_of(flags.config_path, below=CONF.parent) or first
        problems += not_there("-cp", first)
    more = [(SEARCH_PATH, item, folder_of(str(item))) for item in listed]
    if flags.config_dir is not None:
        more.insert(0, ("--config-dir", flags.config_dir, folder_of(flags.config_dir)))
    for asked, item, folder in more:
        problems += not_there(asked, Path(str(item)) if folder is None else folder)
    found = [folder for *_, folder in more if folder is not None and folder.is_dir()]
    path = SearchPath((first, *found), flags.config_name or SearchPath.name)
    return path, problems or no_such_file(path)


def folder_of(text: str, below: Path | None = None) -> Path | None:
    """Of `file:///etc/x`, `pkg://my_package.conf`, `../x`; None for a package that is not there."""
    scheme, _, rest = text.rpartition("://")
    if scheme != "pkg":
        return (below or Path.cwd()) / rest
    package, *parts = rest.split("/")
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:
        spec = None
    places = [] if spec is None else spec.submodule_search_locations or []
    return Path(next(iter(places)), *parts) if places else None


def no_such_file(path: SearchPath) -> list[str]:
    if path.primary.is_file():
        return []
    names = ", ".join(sorted(file.stem for file in path.folders[0].glob("*.yaml")))
    return [f"-cn {path.name}: {path.folders[0]} has no {path.primary.name}; it has: {names}"]
