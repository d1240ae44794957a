"""The folder that Hydra makes for every launch, also for one that only prints its plan."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

HYDRAS = frozenset({".hydra", "launch.log"})


def leave_nothing(run_dir: Path) -> None:
    """Removes it, unless it holds more than Hydra's own files: a run's folder is kept."""
    if not run_dir.is_dir() or not {path.name for path in run_dir.iterdir()} <= HYDRAS:
        return
    shutil.rmtree(run_dir)
    with contextlib.suppress(OSError):  # the folder of all runs of that name holds others
        run_dir.parent.rmdir()
