"""Folders that are built once, when processes die or meet."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from rlpost.models.cache import build_once, sibling


def half_built(folder: Path) -> None:
    (folder / "half").touch()
    time.sleep(60)


def whole(folder: Path) -> None:
    (folder / "whole").touch()


def test_a_builder_that_is_killed_leaves_nothing_and_who_waited_builds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model"
    builder = multiprocessing.get_context("spawn").Process(
        target=build_once, args=(target, half_built)
    )
    builder.start()
    wait_for((sibling(target, "unfinished") / "half").exists)
    waiting = threading.Thread(target=build_once, args=(target, whole))
    waiting.start()
    told = f"[model] waiting for {target}, which is built by process {builder.pid} on "
    out = ""

    def said() -> bool:
        nonlocal out
        out += capfd.readouterr().out
        return told in out

    wait_for(said)
    assert not target.exists()
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    waiting.join(30)
    assert [path.name for path in target.iterdir()] == ["whole"]


def wait_for(holds, timeout_s: float = 30.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)
