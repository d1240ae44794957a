"""From a composed configuration to a printed plan or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def start(node: Any, run_dir: Path, in_sweep: bool) -> float | None:
    """Checks `node`, then prints its plan or runs it. Loads nothing before it is called.

    Of a plan no folder stays, also where the configuration is wrong.
    """
    from rlpost.errors import ConfigError
    from rlpost.plan.folder import leave_nothing

    try:
        return checked_and_started(node, run_dir, in_sweep)
    except ConfigError:
        if node.get("plan") is True and not in_sweep:
            leave_nothing(run_dir)
        raise


def checked_and_started(node: Any, run_dir: Path, in_sweep: bool) -> float | None:
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
