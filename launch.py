"""The one entry point: `python launch.py +recipe=grpo_chain plan=true`.

Exit codes: 0 finished, 1 the run failed, 2 the configuration is wrong, 130 interrupted.
"""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from rlpost.arguments import recipe_in_its_place
from rlpost.cli import readable_errors


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(node: DictConfig) -> float | None:
    """Checks, then prints the plan or runs. The number returned is what a sweep optimises."""
    with readable_errors():
        from rlpost.checks import check
        from rlpost.config import load
        from rlpost.plan import RunPlan

        config = load(node)
        check(config)
        plan = RunPlan.of(config)
        plan.print()
        if config.plan:
            return None
        from rlpost.run import run

        return run(config, plan=plan, run_dir=Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    sys.argv = recipe_in_its_place(sys.argv)
    with readable_errors():
        main()
