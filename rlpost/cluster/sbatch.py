"""The sbatch script of a run on `cluster=slurm`, for those who submit by hand."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlpost.cluster.slurm import SlurmClusterConfig


def script(
    config: SlurmClusterConfig,
    *,
    name: str,
    log: Path,
    folder: Path,
    command: Sequence[str],
) -> str:
    """Text of the script: one task of `command` on each node, started in `folder`.

    The job is warned before its time limit, and may be queued again under its own id, whose run
    folder then holds what was saved.
    """
    return "\n".join(
        [
            "#!/bin/bash",
            *options(config, name=name, log=log),
            "",
            f"cd {shlex.quote(str(folder))}",
            f"srun {shlex.join(command)}",
            "",
        ]
    )


def options(config: SlurmClusterConfig, *, name: str, log: Path) -> Iterator[str]:
    """The `#SBATCH` lines; `cluster.sbatch` has the last word."""
    chosen: dict[str, str | int | bool] = {
        "job-name": name,
        "nodes": config.num_nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": config.num_cpus_per_node,
        "gpus-per-node": config.num_gpus_per_node,
        "time": config.time_limit_min,
        "signal": f"USR2@{config.signal_delay_s}",
        "requeue": True,
        "output": str(log),
        "open-mode": "append",
    }
    if not config.num_gpus_per_node:
        del chosen["gpus-per-node"]
    for key, value in (chosen | {k.replace("_", "-"): v for k, v in config.sbatch.items()}).items():
        if value is True:
            yield f"#SBATCH --{key}"
        elif value is not False:
            yield f"#SBATCH --{key}={shlex.quote(str(value))}"
