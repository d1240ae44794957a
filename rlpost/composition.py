"""Configurations composed by Hydra outside, or beside, the one that launch.py was started with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict, read_write

from rlpost.arguments import recipe_in_its_place
from rlpost.config import RunConfig, load
from rlpost.errors import ConfigError
from rlpost.option_files import lists_of_one

CONF = Path(__file__).parent.parent / "conf"


@dataclass(frozen=True)
class SearchPath:
    """`name`.yaml in the first of `folders` begins a configuration; options come from all."""

    folders: tuple[Path, ...] = (CONF,)
    name: str = "config"

    @property
    def primary(self) -> Path:
        return self.folders[0] / f"{self.name}.yaml"


OURS = SearchPath()
SEARCH_PATH = "hydra.searchpath"


def compose_node(overrides: Sequence[str], path: SearchPath = OURS) -> DictConfig:
    """The composed configuration for these overrides, outside a Hydra application."""
    GlobalHydra.instance().clear()
    first, *more = path.folders
    paths = ", ".join(f"file://{folder}" for folder in more)
    chosen = recipe_in_its_place(overrides)
    chosen += [f"hydra.searchpath=[{paths}]"] if more else []
    with initialize_config_dir(str(first), version_base="1.3"):
        node = compose(path.name, overrides=chosen, return_hydra_config=True)
    HydraConfig.instance().set_config(node)  # `${hydra:...}` is looked up there
    with open_dict(node):
        del node["hydra"]
    return node


def load_chosen(node: DictConfig) -> RunConfig:
    """`load`, and one option of each group; for the configuration under way. Raises ConfigError."""
    hydra = HydraConfig.get()
    folders = [Path(item.path) for item in hydra.runtime.config_sources if item.schema == "file"]
    # Of the folders only those of the search path may be missing: Hydra does without them.
    missing = [line for folder in folders for line in not_there(SEARCH_PATH, folder.absolute())]
    if problems := [*missing, *lists_of_one(hydra.overrides.task, folders)]:
        raise ConfigError(problems)
    return load(node)


def not_there(asked: str, folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        yield f"{asked}: there is no folder {folder}"


def jobs_of(sweep: DictConfig, jobs: Sequence[Sequence[str]]) -> Iterator[DictConfig]:
    """The configuration of each job of the sweep under way, whose own one is Hydra's again then."""
    loader = GlobalHydra.instance().config_loader()
    try:
        for number, overrides in enumerate(jobs):
            node = loader.load_sweep_config(sweep, list(overrides))
            with open_dict(node):
                node.hydra.job.id = node.hydra.job.num = number
            HydraConfig.instance().set_config(node)
            with read_write(node), open_dict(node):
                del node["hydra"]
            yield node
    finally:
        HydraConfig.instance().set_config(sweep)


def load_beside(overrides: Sequence[str]) -> RunConfig:
    """Another run's configuration; the application under way keeps its own. Raises ConfigError."""
    with _hydra_restored():
        try:
            return load(compose_node(overrides))
        except HydraException as error:
            raise ConfigError([f"{' '.join(overrides)} can't be composed: {error}"]) from error


@contextmanager
def _hydra_restored() -> Iterator[None]:
    state = Singleton.get_state()
    try:
        yield
    finally:
        Singleton.set_state(state)
