"""What a run ran in: Python, packages, machine, variables, and the code's revision and changes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CODE = Path(__file__).parents[2]
GIT_TIMEOUT_S = 20.0
DIFF_BYTES = 4_000_000  # of a longer one the start is kept
# Variables that change what a run does or how fast it is.
RELEVANT = re.compile(
    r"^(CUDA|NVIDIA|NCCL|GLOO|UCX|TORCH|PYTORCH|TRITON|NVTE|MEGATRON|VLLM|RAY|HF|TRANSFORMERS"
    r"|TOKENIZERS|OMP|MKL|OPENBLAS|SLURM|RLPOST|HYDRA|MLFLOW|PYTHON|LD|XLA)_?"
)
SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|_KEY$|_KEY_|AUTH", re.IGNORECASE)
IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")  # user:password@ of an address


def write_environment(run_dir: Path) -> list[Path]:
    """Writes `environment.json` and, where the code has changes beyond its commit, `git.diff`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    written = [run_dir / "environment.json"]
    written[0].write_text(json.dumps(environment(), indent=1) + "\n")
    diff = git_diff(CODE)
    if diff:
        written.append(run_dir / "git.diff")
        written[1].write_bytes(diff)
    return written


def environment() -> dict[str, Any]:
    return {
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "python": sys.version,
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "git": git_state(CODE),
        "variables": variables(os.environ),
        "packages": packages(),
    }


def packages() -> dict[str, str]:
    """Name -> version of everything that is installed."""
    found = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those that matter to a run; never one whose name or value looks like a secret."""
    return {
        name: IN_ADDRESS.sub("***@", value)
        for name, value in sorted(environ.items())
        if RELEVANT.match(name) and not SECRET.search(name)
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and changed files; None outside a checkout or without git."""
    commit = git_commit(folder)
    if commit is None:
        return None
    return {
        "commit": commit,
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "changed": (_git(folder, "status", "--porcelain") or "").splitlines(),
    }


def git_commit(folder: Path = CODE) -> str | None:
    """None where `folder` is no checkout, or part of one that is not its own."""
    return _git(folder, "rev-parse", "HEAD") if (folder / ".git").exists() else None


def git_diff(folder: Path) -> bytes:
    """Changes of tracked files since the commit; empty without any, or without a checkout."""
    if git_commit(folder) is None:
        return b""
    text = (_git(folder, "diff", "HEAD") or "").encode()
    return text if len(text) <= DIFF_BYTES else text[:DIFF_BYTES] + b"\n... cut here\n"


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None if there is no git, or it fails or takes too long."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").rstrip("\n")
