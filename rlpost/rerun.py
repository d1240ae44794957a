"""rerun.yaml in a run's folder: its whole configuration as one file that starts it again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlpost.composition import CONF

NAME = "rerun"


def write_rerun(settings: Mapping[str, Any], run_dir: Path) -> Path:
    """`settings` are the run's plain values. Needs nothing of conf/, which may change."""
    hydra = yaml.safe_load((CONF / "hydra" / "default.yaml").read_text())
    # The values keep to the limits already; those that are set when it is rerun need not.
    debug = {**settings["debug"], "limits": {}, "command_line": []}
    whole = {"hydra": hydra, **settings, "debug": debug}
    path = run_dir / f"{NAME}.yaml"
    command = f"python launch.py -cp {run_dir.absolute()} -cn {NAME}"
    head = f"# Runs once more, into a new folder: {command}\n"
    path.write_text(head + yaml.safe_dump(whole, sort_keys=False))
    return path
