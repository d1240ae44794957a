"""The pure parts of a sweep: what is compared, what is recorded, and in which order it is told."""

from __future__ import annotations

import csv
import io
import json
import math
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rlpost.composition import compose_node
from rlpost.config import load
from rlpost.errors import ConfigError, EngineError, TrackingError
from rlpost.objective import ObjectiveConfig, objective_of
from rlpost.sweeps import session, summary
from rlpost.sweeps.interrupt import interrupt_jobs
from rlpost.sweeps.job import Job
from rlpost.sweeps.record import JobRecord, read_all, write
from rlpost.tracking import sweep_file

HISTORY = {
    "eval/chain_sum/accuracy": [0.1, 0.7, 0.4],
    "eval/chain_sum/missing": [0.0, 0.0, 0.0],
    "train/loss": [0.3, math.nan],
}


def objective(metric: str, direction: str = "maximize", reduce: str = "last") -> ObjectiveConfig:
    return ObjectiveConfig(metric, direction, reduce)  # type: ignore[arg-type]


def record(job: int, value: float | None, status: str = "FINISHED") -> JobRecord:
    overrides = ("recipe=x", f"seed={job}")
    return JobRecord(job, f"/out/{job}", overrides, status, value, 1.25, "", "here", 1)  # type: ignore


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        (objective("eval/*/accuracy"), 0.4),
        (objective("eval/chain_sum/accuracy", reduce="best"), 0.7),
        (objective("eval/*/accuracy", "minimize", "best"), 0.1),
        (objective("train/loss", "minimize", "best"), 0.3),
        (objective("train/loss"), math.nan),
    ],
)
def test_the_objective_is_the_last_or_best_value_of_its_metric(
    wanted: ObjectiveConfig, value: float
) -> None:
    assert objective_of(wanted, HISTORY) == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("eval/chain_sum/accurracy", r"did you mean 'eval/chain_sum/accuracy'\?; under eval/"),
        ("reward", "it reported metrics under eval, train"),
        ("eval/*", r"fits 2 metrics of the run; write one of them: eval/chain_sum/accuracy, eval/"),
    ],
)
def test_an_objective_that_no_one_metric_fits_names_those_near_it(metric: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        objective_of(objective(metric), HISTORY)


def test_the_best_job_comes_first_and_those_without_a_number_last() -> None:
    records = [record(0, None, "FAILED"), record(1, 0.2), record(2, 0.9), record(3, None, "KILLED")]
    assert [item.job for item in summary.ranked(records, "maximize")] == [2, 1, 0, 3]
    assert [item.job for item in summary.ranked(records, "minimize")] == [1, 2, 0, 3]


def test_the_summary_holds_the_whole_number_and_only_what_differs() -> None:
    failed = replace(record(1, None, "FAILED"), overrides=("recipe=x",), reason="a|b\nc")
    records = [record(0, 1 / 3), failed]
    first, second = csv.DictReader(io.StringIO(summary.csv_text(records, ["seed"])))
    assert float(first["objective"]) == 1 / 3 and first["overrides"] == "seed=0"
    assert second["reason"] == "a|b\nc" and second["overrides"] == ""
    text = summary.markdown(records, ["seed"], "title")
    assert "- for all jobs: `recipe=x`" in text and r"a\|b<br>c" in text


def test_the_table_is_readable_in_80_columns() -> None:
    varied = ["trainer.optimizer.lr", "algorithm", "reward.parts.own.function.wanted"]
    overrides = ("recipe=x", *(f"{key}=0.00012345" for key in varied))
    failed = replace(record(1, None, "FAILED"), overrides=overrides, reason="EngineError: died\nat")
    records = [replace(record(0, 1 / 3), overrides=overrides), failed]
    console = Console(width=80, file=io.StringIO())
    console.print(summary.table(records, varied))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (first,) = [line for line in lines if "FINISHED" in line]
    assert "lr=0.0001234 algorithm=" in first and " 0.333333 " in first
    assert len(lines) == 8 and max(map(len, lines)) <= 80
    assert summary.reasons(records) == ["job 1 FAILED: EngineError: died"]


def job(folder: Path, *, stop_sweep: bool = False) -> Job:
    return Job(0, folder / "0", ("seed=1",), plan=False, stop_sweep=stop_sweep)


def fail(error: BaseException) -> float:
    raise error


@pytest.mark.parametrize("error", [EngineError("engine 0 died"), ZeroDivisionError("crash")])
def test_a_failed_job_returns_nothing_and_leaves_its_reason(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(tmp_path).run(lambda: fail(error)) is None
    (found,) = read_all(tmp_path)
    assert (found.status, found.reason) == ("FAILED", f"{type(error).__name__}: {error}")
    assert found.reason in capsys.readouterr().err


def test_a_failed_job_ends_the_sweep_if_asked(tmp_path: Path) -> None:
    with pytest.raises(EngineError):  # of a process that only runs the job
        job(tmp_path, stop_sweep=True).run(lambda: fail(EngineError("died")))
    with pytest.raises(SystemExit), session.whole_sweep():  # Hydra stops at no Exception
        session.lead(session.Sweep(tmp_path, None, [], []))
        job(tmp_path, stop_sweep=True).run(lambda: fail(EngineError("died")))
    assert "FAILED" in (tmp_path / "summary.md").read_text()


def test_a_number_that_is_none_is_said_and_kept_from_the_sweeper(tmp_path: Path) -> None:
    assert job(tmp_path).run(lambda: math.nan) is None
    (found,) = read_all(tmp_path)
    assert (found.status, found.reason) == ("FINISHED", "the objective has no value")


def test_ctrl_c_marks_the_job_and_leaves_the_summary(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), session.whole_sweep():
        session.lead(session.Sweep(tmp_path, None, [], []))
        job(tmp_path).run(lambda: fail(KeyboardInterrupt()))
    (found,) = read_all(tmp_path)
    assert found.status == "KILLED" and "KILLED" in (tmp_path / "summary.csv").read_text()


def test_a_job_that_never_wrote_its_end_has_failed_when_the_sweep_is_over(tmp_path: Path) -> None:
    job(tmp_path)
    with pytest.raises(SystemExit) as ending, session.whole_sweep():
        session.lead(session.Sweep(tmp_path, None, [], []))
    assert ending.value.code == 1
    assert "its process ended without a word" in (tmp_path / "summary.md").read_text()


def test_a_store_that_can_not_be_reached_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    store = load(compose_node([f"tracking.mlflow.tracking_uri=sqlite:///{tmp_path}/file/runs.db"]))
    sweep = session.Sweep(tmp_path, None, list(store.tracking.values()), [])
    with pytest.raises(TrackingError, match="MLflow could not start"), session.whole_sweep():
        session.lead(sweep)
        sweep.begin("sweep", {})
    assert not caplog.records


def test_a_job_finds_the_run_of_its_sweep_in_the_same_store_only(tmp_path: Path) -> None:
    sweep_file.write(tmp_path, {"sqlite:///a.db": "abc"}, [])
    assert sweep_file.parent_run(tmp_path / "3", "sqlite:///a.db") == "abc"
    assert sweep_file.parent_run(tmp_path / "3", "sqlite:///b.db") is None
    assert sweep_file.parent_run(tmp_path.parent / "alone", "sqlite:///a.db") is None


def test_a_jobs_run_is_named_by_what_tells_it_from_the_others(tmp_path: Path) -> None:
    varied = ["trainer.optimizer.lr", "data.size", "eval.data.size", "algorithm"]
    sweep_file.write(tmp_path, {}, varied)
    (tmp_path / "3" / ".hydra").mkdir(parents=True)
    overrides = ["recipe=x", "trainer.optimizer.lr=0.00012346", "+data.size=8", "algorithm=rloo"]
    (tmp_path / "3" / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    name = "lr=0.0001235 data.size=8 algorithm=rloo"
    assert sweep_file.name_among_jobs(tmp_path / "3") == name
    assert sweep_file.name_among_jobs(tmp_path / "4") == "4"


def heed_sigint() -> None:
    """Tests that a script started in the background inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_reaches_a_job_in_another_process(tmp_path: Path) -> None:
    job(tmp_path)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, preexec_fn=heed_sigint) as other:
        write(replace(read_all(tmp_path)[0], pid=other.pid))
        with pytest.raises(KeyboardInterrupt), session.whole_sweep():
            session.lead(session.Sweep(tmp_path, None, [], []))
            raise KeyboardInterrupt
        assert other.wait(0) == -signal.SIGINT
    assert "its process ended without a word" in (tmp_path / "summary.md").read_text()


def test_ctrl_c_reaches_a_job_that_is_only_starting(tmp_path: Path) -> None:
    """The starting process stands for submitit's, which the job's record comes out of."""
    code = "import time; time.sleep(60)"
    command = [sys.executable, "-c", code, "submitit.core._submit", f"{tmp_path}/.submitit/%j"]
    job(tmp_path)
    (running,) = read_all(tmp_path)
    (tmp_path / "0" / "status.json").unlink()
    with subprocess.Popen(command, preexec_fn=heed_sigint) as starting:
        recorded = threading.Timer(1.0, lambda: write(replace(running, pid=starting.pid)))
        recorded.start()
        interrupt_jobs(tmp_path)
        assert starting.wait(0) == -signal.SIGINT
    interrupt_jobs(tmp_path)  # there is nothing left to wait for


def test_an_interrupted_sweep_names_the_jobs_that_go_on(tmp_path: Path) -> None:
    job(tmp_path)
    write(replace(read_all(tmp_path)[0], host="elsewhere", pid=1))
    with pytest.raises(KeyboardInterrupt), session.whole_sweep():
        session.lead(session.Sweep(tmp_path, None, [], []))
        raise KeyboardInterrupt
    assert "still runs as process 1 on elsewhere" in (tmp_path / "summary.md").read_text()
