"""The one entry point: `python launch.py +recipe=grpo_chain plan=true`; with `-m`, a sweep.

Exit codes: 0 finished, 1 the run failed, 2 the configuration is wrong, 130 interrupted.
"""

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from rlpost.arguments import as_hydra_takes_it, completed_in_its_place
from rlpost.cli import readable_errors
from rlpost.help import asks_for_help, help_text
from rlpost.start import start
from rlpost.sweeps.job import as_job, whole_sweep


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(node: DictConfig) -> float | None:
    """A run on its own, or a job of a sweep; then the number is what the sweep compares."""
    return as_job(node, HydraConfig.get(), start)


if __name__ == "__main__":
    sys.argv[1:] = as_hydra_takes_it(sys.argv[1:])
    completed_in_its_place(os.environ)
    if asks_for_help(sys.argv[1:]):
        print(help_text())
        sys.exit()
    with readable_errors(), whole_sweep():
        main()
