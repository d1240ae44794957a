"""Asking for help, the configuration or the plan must not load the heavy libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
HEAVY = [
    "torch",
    "ray",
    "vllm",
    "megatron",
    "transformers",
    "mlflow",
    "pyarrow",
    "tensorboard",
    "optuna",
    "submitit",
]
# Runs launch.py as a script and reports, whatever its exit, what it loaded.
LAUNCH = """
import json, runpy, sys
sys.argv = ["launch.py", *{arguments!r}]
try:
    runpy.run_path("launch.py", run_name="__main__")
finally:
    loaded = [name for name in {heavy!r} if name in sys.modules]
    print("loaded", json.dumps(loaded), file=sys.stderr)
"""
TARGETS = """
import importlib, json, pathlib, re, sys
for file in pathlib.Path("conf").rglob("*.yaml"):
    for name in re.findall(r"_target_: *([\\w.]+)", file.read_text()):
        importlib.import_module(name.rpartition(".")[0])
print("loaded", json.dumps([name for name in {heavy!r} if name in sys.modules]), file=sys.stderr)
"""


def loaded_by(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.rpartition("loaded ")[2])  # type: ignore[no-any-return]


ANSWERS = (["--help"], ["--cfg", "job"], ["-sc", "query=bash"], ["plan=true"])


@pytest.mark.parametrize("arguments", ANSWERS, ids=str)
def test_launch_answers_without_heavy_libraries(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "python launch.py +recipe=gr"
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    before = os.times()
    assert loaded_by(LAUNCH.format(arguments=arguments, heavy=HEAVY)) == []
    after = os.times()  # of the CPU: whoever else is on the machine does not count
    assert after.children_user - before.children_user < 5  # about 1.5 s


def test_modules_with_targets_load_no_heavy_libraries() -> None:
    assert loaded_by(TARGETS.format(heavy=[*HEAVY, "reasoning_gym"])) == []
