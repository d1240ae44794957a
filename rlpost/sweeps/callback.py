"""Hydra's hook at the start of a sweep, in the process that leads it."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from rlpost.cli import readable_errors
from rlpost.errors import ConfigError


class SweepCallback(Callback):
    """Has no state: a launcher may send it to the jobs."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with not_only_a_warning(), readable_errors():
            HydraConfig.instance().set_config(config)  # `${hydra:...}` is looked up there
            begin(config)


@contextlib.contextmanager
def not_only_a_warning() -> Iterator[None]:
    """Hydra prints a hook's exception as a warning and goes on; a fault here ends the sweep."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(1) from error


def begin(config: DictConfig) -> None:
    from rlpost.config import load_sweep
    from rlpost.sweeps import grid, session
    from rlpost.tracking.mlflow import MlflowTracker

    with read_write(config.hydra), open_dict(config.hydra):
        folder = pin_folder(config)
        settings = load_sweep(config)
        direction = settings.objective.direction if settings.objective else "maximize"
        adapt_optuna(config, direction)
    asked_for = params(config)
    listed = asked_for["sweeper"].get("params") or {}
    loader = GlobalHydra.instance().config_loader()
    overrides = grid.parsed(listed, config.hydra.overrides.task, loader)
    if str(config.hydra.sweeper._target_).endswith(".BasicSweeper"):
        grid.check_jobs(config, grid.combinations(overrides))
    chosen = [] if settings.plan else settings.tracking.values()
    stores = [item for item in chosen if issubclass(item.target, MlflowTracker)]
    sweep = session.Sweep(
        folder,
        settings.objective,
        stores,
        grid.varied_keys(overrides),
        jobs_apart=str(config.hydra.launcher._target_).endswith(".LocalLauncher"),
    )
    session.lead(sweep)
    sweep.begin(f"{settings.run_name} sweep", asked_for)


def pin_folder(config: DictConfig) -> Path:
    """The same for all jobs, though their own `run_name` and clock would give other ones."""
    folder = Path(config.hydra.sweep.dir).absolute()
    text = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{text}'")
    config.hydra.sweep.dir = str(folder)
    return folder


def params(config: DictConfig) -> dict[str, Any]:
    """What the sweep was asked for."""
    sweeper = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
    return {
        "overrides": {
            text.partition("=")[0]: text.partition("=")[2] for text in config.hydra.overrides.task
        },
        "objective": OmegaConf.to_container(config, resolve=False)["objective"],  # type: ignore
        "sweeper": sweeper,
    }


def adapt_optuna(config: DictConfig, direction: str) -> None:
    """Optuna wants what `objective` says. Raises ConfigError if it is told something else."""
    sweeper = config.hydra.sweeper
    if not str(sweeper.get("_target_")).endswith(".OptunaSweeper"):
        return
    given = {text.partition("=")[0]: text for text in config.hydra.overrides.hydra}
    problems = [
        f"{given[key]}: {reason}"
        for key, reason in {
            "hydra.sweeper.direction": "set objective.direction, which Optuna is given",
            "hydra.sweeper.max_failure_rate": "set stop_sweep_on_failure=true, or leave it out",
        }.items()
        if key in given
    ]
    if sweeper.storage is not None:
        problems.append(
            f"hydra.sweeper.storage ({sweeper.storage}): Optuna 2, the one that the sweeper takes, "
            "can't keep a study in a database through SQLAlchemy 2; leave it null: the trials are "
            "in MLflow and in summary.csv, the best of them in optimization_results.yaml"
        )
    if config.objective is None:
        problems.append("objective: null, but Optuna needs a number; set objective.metric")
    if problems:
        raise ConfigError(problems)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # Optuna's, of no interest here
    sweeper.direction = direction
    sweeper.max_failure_rate = 1.0
