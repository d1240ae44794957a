"""What one process of a run does: it leads the run, or lends its node to it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from rlpost.checkpoint import complete, saved_step
from rlpost.cluster.signals import heeding_warnings
from rlpost.cluster.slurm_job import term_patience_s, was_requeued
from rlpost.config import RunConfig, build
from rlpost.errors import StoppedError
from rlpost.plan import RunPlan
from rlpost.run import run
from rlpost.tracking.files import forget_after

# Hydra's keys that a single run has no use for.
OF_A_SWEEP = ("hydra.mode=", "hydra.sweep", "hydra/sweeper=", "hydra.launcher", "hydra/launcher=")


def take_part(config: RunConfig, *, plan: RunPlan, run_dir: Path, compared: bool) -> float | None:
    """Runs to the end, or lends this node until the run has ended, or only writes its script.

    A run that heeded a scheduler's warning is queued again after it has left, and raises
    StoppedError. One that the scheduler ends is not, and raises KeyboardInterrupt.
    """
    cluster = build(config.cluster, log_dir=run_dir / "logs")
    if cluster.only_renders:
        print(cluster.render(name=config.run_name, run_dir=run_dir, command=own_command()))
        return None
    with heeding_warnings(term_patience_s(os.environ)) as stop:
        if not cluster.leads:
            cluster.lend()
            return None
        plan.announce(run_dir, in_sweep=compared)
        try:
            with cluster.leading():
                return run(
                    going_on(config, run_dir),
                    plan=plan,
                    run_dir=run_dir,
                    compared=compared,
                    cluster=cluster,
                    stop=stop,
                )
        except StoppedError as error:
            stopped = error
    stop.pass_on(cluster.requeue)
    raise stopped


def own_command() -> list[str]:
    """What starts this run, as a job of its own and not as one of a sweep."""
    overrides = HydraConfig.get().overrides
    kept = [item for item in overrides.hydra if not item.startswith(OF_A_SWEEP)]
    kept += [item for item in overrides.task if not item.startswith("cluster.render=")]
    return [sys.executable, str(Path(sys.argv[0]).absolute()), *kept]


def going_on(config: RunConfig, run_dir: Path) -> RunConfig:
    """A run whose own folder holds a complete checkpoint goes on from the newest one.

    An explicit `resume_from` wins, until the job is queued again.
    """
    own = complete(run_dir / "checkpoints")
    if not own:
        forget_after(run_dir, -1)  # of a start that saved nothing: its steps come again
        return config
    if config.resume_from is not None and not was_requeued(os.environ):
        return config
    print(f"going on from {own[-1]}, which this run's own folder holds", flush=True)
    forget_after(run_dir, saved_step(own[-1]))
    return replace(config, resume_from=str(own[-1]))
