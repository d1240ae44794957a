"""The folder that Hydra makes for every launch, also for one that starts nothing."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

HYDRAS = frozenset({".hydra", "launch.log"})


def leave_nothing(run_dir: Path) -> None:
    """Removes it, unless it holds more than Hydra's own files: a run's folder is kept."""
    # The folders above may hold other runs; and each node of a launch on many does this.
    with contextlib.suppress(OSError):
        if {path.name for path in run_dir.iterdir()} <= HYDRAS:
            shutil.rmtree(run_dir)
            run_dir.parent.rmdir()
            run_dir.parent.parent.rmdir()
