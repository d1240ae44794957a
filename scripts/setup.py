"""Makes .venv and installs the pinned packages into it; does nothing when that is done already.

Runs on the system's Python with the standard library alone, and starts on old versions too, so
that they get a message rather than a syntax error.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PIP = "26.2.1"  # the first versions of pip download a whole wheel in a dry run
FREE_GB = 8
LOCKS = ("requirements/cpu.txt", "requirements/dev.txt")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
GPU_PACKAGES = re.compile(r"(nvidia|cuda)[-_]", re.IGNORECASE)


class SetupError(Exception):
    """The machine lacks something; the message says what, and how to get it."""


def check_python(version: tuple[int, ...]) -> None:
    """Raises SetupError unless the packages pinned in requirements/ exist for this Python."""
    if not (3, 11) <= tuple(version[:2]) <= (3, 12):
        raise SetupError(
            "rlpost needs Python 3.11 or 3.12, this is {}.{}; name another one with "
            "`make setup PYTHON=/path/to/python3.11`".format(*version[:2])
        )


def check_machine() -> None:
    """Raises SetupError when the venv module, a C compiler or Python's headers are missing."""
    name = "python{}.{}".format(*sys.version_info[:2])
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise SetupError(
            f"requirements/cpu.txt is for Linux on x86_64, this is {platform.system()} on "
            f"{platform.machine()}; use a Linux container or virtual machine"
        )
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        raise SetupError(f"Python's venv module is missing; on Debian: apt install {name}-venv")
    if not (shutil.which("cc") or shutil.which("gcc")):
        raise SetupError("a C compiler is missing; on Debian: apt install gcc")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise SetupError(f"Python's C headers are missing; on Debian: apt install {name}-dev")


def check_disk(folder: Path) -> None:
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < FREE_GB:
        raise SetupError(f"{folder} has {free_gb:.1f} GB free, the packages need {FREE_GB} GB")


def stamp_path(root: Path) -> Path:
    """The file that says: exactly these packages are installed."""
    digest = hashlib.sha256()
    for name in (*LOCKS, "pyproject.toml"):
        digest.update((root / name).read_bytes())
    return root / ".venv" / f".installed-{digest.hexdigest()[:16]}"


def gpu_packages(requires: list[str]) -> list[str]:
    """Names of the GPU packages that a build of torch asks for; none for the CPU build."""
    return [line for line in requires if GPU_PACKAGES.match(line)]


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def make_venv(root: Path) -> Path:
    """The environment's Python; a half-made environment is made anew."""
    python = root / ".venv" / "bin" / "python"
    works = python.exists() and not subprocess.call(
        [str(python), "-m", "pip", "--version"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if not works:
        run(sys.executable, "-m", "venv", "--clear", str(root / ".venv"))
    return python


def torch_requires(python: Path, requirement: str) -> list[str]:
    """What the torch build that is installed, or else would be, asks for. Downloads no wheel."""
    query = "import importlib.metadata as m; import json; print(json.dumps(m.requires('torch')))"
    known = subprocess.run(
        [str(python), "-c", query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    if known.returncode == 0:
        return list(json.loads(known.stdout) or [])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        dry_run = ("install", "--dry-run", "--no-deps", "--quiet", "--report", str(report))
        run(str(python), "-m", "pip", *dry_run, requirement)
        found = json.loads(report.read_text())["install"]
    return [line for package in found for line in package["metadata"].get("requires_dist", [])]


def check_torch(python: Path, requirement: str) -> None:
    """Raises SetupError when torch would come in its GPU build: gigabytes of no use to a CPU."""
    unwanted = gpu_packages(torch_requires(python, requirement))
    if unwanted:
        raise SetupError(
            f"{requirement} comes from your package index in its GPU build (it asks for "
            f"{unwanted[0].split(';')[0].strip()} and {len(unwanted) - 1} more). Install the CPU "
            "build, then go on with the same make command:\n\n"
            f"    .venv/bin/pip install {requirement} --index-url {TORCH_CPU_INDEX}\n"
        )


def torch_pin(root: Path) -> str:
    lines = (root / LOCKS[0]).read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def install(root: Path) -> None:
    """Installs everything; the stamp is written last, so an interrupted install starts again."""
    check_machine()
    check_disk(root)
    for old in (root / ".venv").glob(".installed-*"):
        old.unlink()
    python = make_venv(root)
    pip = (str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input")
    run(*pip, "--quiet", f"pip=={PIP}")
    check_torch(python, torch_pin(root))
    locks = [part for name in LOCKS for part in ("-r", str(root / name))]
    run(*pip, "--no-deps", *locks)
    run(*pip, "--quiet", "--no-deps", "--no-build-isolation", "-e", str(root))
    stamp_path(root).touch()


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    if stamp_path(root).exists():
        return 0
    try:
        check_python(sys.version_info[:3])
        print("Installing the pinned packages into .venv (once; some minutes)", flush=True)
        install(root)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        print(f"setup: this command failed ({error.returncode}): {command}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.environ.pop("PYTHONHOME", None)
    sys.exit(main())
