"""Exit codes and what is printed for each kind of error."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from rlpost.cli import readable_errors
from rlpost.errors import BudgetError, ConfigError
from rlpost.run import closing

CASES = [
    (ConfigError(["a: wrong", "b: wrong"]), 2, "2 configuration problems:\n  - a: wrong"),
    (BudgetError("too many failed rewards"), 1, "BudgetError: too many failed rewards"),
    (OSError(errno.ENOSPC, "No space left on device"), 1, "the disk is full: [Errno 28] No space"),
    (KeyboardInterrupt(), 130, "interrupted"),
]


@pytest.mark.parametrize(("error", "code", "text"), CASES, ids=lambda item: str(item)[:20])
def test_expected_errors_are_one_block_and_a_code(
    error: BaseException,
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch.py"])
    with pytest.raises(SystemExit) as exit_, readable_errors():
        raise error
    assert exit_.value.code == code
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("fails", "said"), [(True, "budget"), (False, "no space")])
def test_what_a_run_died_of_comes_before_what_closing_stumbles_over(
    fails: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        def close(self, status: str) -> None:
            raise OSError("no space")

    dismissed: list[int] = []
    with (
        pytest.raises((BudgetError, OSError), match=said),
        closing(Full(), then=lambda: dismissed.append(1)),
    ):
        if fails:
            raise BudgetError("budget")
    assert dismissed == [1]
    assert ("closing the trackers: OSError: no space" in capsys.readouterr().err) == fails


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), readable_errors():
        raise ZeroDivisionError


def test_a_missing_file_that_the_program_reads_is_its_own_fault() -> None:
    with pytest.raises(FileNotFoundError), readable_errors():
        Path("/proc/nowhere/file").read_text()
    with pytest.raises(FileNotFoundError), readable_errors():
        Path("/proc/nowhere").mkdir()
