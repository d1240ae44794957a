"""The one entry point: `python launch.py +recipe=grpo_chain plan=true`; with `-m`, a sweep.

Exit codes: 0 finished, 1 the run failed, 2 the configuration is wrong, 130 interrupted.
"""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from rlpost.arguments import recipe_in_its_place
from rlpost.cli import readable_errors
from rlpost.help import asks_for_help, help_text
from rlpost.sweeps.job import as_job, whole_sweep


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(node: DictConfig) -> float | None:
    """A run on its own, or a job of a sweep; then the number is what the sweep compares."""
    return as_job(node, HydraConfig.get(), start)


def start(node: DictConfig, run_dir: Path, in_sweep: bool) -> float | None:
    """Checks, then prints the plan or runs."""
    from rlpost.checks import check
    from rlpost.composition import load_chosen
    from rlpost.plan import RunPlan

    config = load_chosen(node)
    check(config, compared=in_sweep)
    plan = RunPlan.of(config)
    if config.plan:
        plan.show(run_dir, in_sweep=in_sweep)
        return None
    plan.check()
    from rlpost.job import take_part

    return take_part(config, plan=plan, run_dir=run_dir, compared=in_sweep)


if __name__ == "__main__":
    sys.argv = recipe_in_its_place(sys.argv)
    if asks_for_help(sys.argv[1:]):
        print(help_text())
        sys.exit()
    with readable_errors(), whole_sweep():
        main()
