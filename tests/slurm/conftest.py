"""The Slurm that these tests submit to. They need one of two nodes, on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

HOW = (
    "no Slurm answers; on Debian as root: apt install slurm-wlm munge, then "
    "export SLURM_CONF=$(python tests/slurm/one_machine.py start /tmp/slurm), as .ci/run does"
)


@pytest.fixture(scope="session", autouse=True)
def slurm_answers() -> None:
    if "SLURM_CONF" not in os.environ or shutil.which("sinfo") is None:
        pytest.skip(HOW)
    said = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True)
    if not re.search(r"^ClusterName\s*= onemachine$", said.stdout, re.MULTILINE):
        pytest.skip(HOW)  # another cluster has other nodes, and other people's jobs
