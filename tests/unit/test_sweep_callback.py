"""What Hydra's start hook makes of a sweep's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict, read_write

from rlpost.composition import CONF
from rlpost.errors import ConfigError
from rlpost.sweeps import grid
from rlpost.sweeps.callback import adapt_optuna, params, pin_folder


@pytest.fixture(autouse=True)
def no_hydra_stays() -> Iterator[None]:
    yield
    GlobalHydra.instance().clear()


def composed(overrides: Sequence[str]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        node = compose("config", overrides=list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(node)
    return node


def adapted(*overrides: str) -> DictConfig:
    node = composed(["hydra/sweeper=optuna", *overrides])
    with read_write(node.hydra), open_dict(node.hydra):
        adapt_optuna(node, node.objective.direction if node.objective else "maximize")
    return node.hydra.sweeper


def test_optuna_goes_the_way_of_the_objective_and_survives_failed_trials() -> None:
    assert adapted().direction == "maximize"
    sweeper = adapted("objective.direction=minimize")
    assert (sweeper.direction, sweeper.max_failure_rate) == ("minimize", 1.0)


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("hydra.sweeper.direction=minimize", "set objective.direction"),
        ("hydra.sweeper.max_failure_rate=0.5", "set stop_sweep_on_failure=true"),
        ("hydra.sweeper.storage='sqlite:///study.db'", "leave it null"),
        ("objective=null", "set objective.metric"),
    ],
)
def test_what_optuna_can_not_follow_is_refused(override: str, way_out: str) -> None:
    with pytest.raises(ConfigError, match=way_out):
        adapted(override)


def test_what_varies_is_known_before_the_jobs() -> None:
    params = {"algorithm": "grpo,rloo", "trainer.optimizer.lr": "1e-4,3e-4", "seed": 3}
    line = ["recipe=x", "algorithm=dapo", "+data.size=range(0,3)"]
    overrides = grid.parsed(params, line, None)
    assert grid.varied_keys(overrides) == ["trainer.optimizer.lr", "data.size"]
    jobs = grid.combinations(overrides)
    assert len(jobs) == 6 and {job[0] for job in jobs} == {"algorithm=dapo"}


def test_a_problem_is_told_by_what_its_jobs_have_in_common() -> None:
    jobs = [[f"seed={seed}", f"lr={rate}", "a=1"] for seed in (1, 2) for rate in (3, 4)]
    assert grid.whose([0, 1, 2, 3], jobs) == ""
    assert grid.whose([1, 3], jobs) == "with lr=4: "
    assert grid.whose([3], jobs) == "with seed=2 lr=4: "
    assert grid.whose([0, 3], jobs) == "with seed=1 lr=3, and in 1 more jobs: "


def test_all_jobs_get_the_folder_of_their_sweep(tmp_path: Path) -> None:
    node = composed([f"output_dir='{tmp_path}/it\\'s'"])
    with read_write(node.hydra), open_dict(node.hydra):
        folder = pin_folder(node)
    assert folder.parent.parent.parent == tmp_path and folder.is_absolute()
    (override,) = [item for item in node.hydra.overrides.hydra if "sweep.dir" in item]
    assert composed([override]).hydra.sweep.dir == str(folder)


def test_the_sweeps_own_run_says_what_was_asked_for() -> None:
    node = composed(["seed=7"])
    assert params(node)["overrides"] == {"seed": "7"}
    assert params(node)["objective"]["metric"] == "eval/*/accuracy"
