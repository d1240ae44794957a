"""What goes wrong in a run ends it soon, with one clear message and the true status."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from shared_runs import AT_ONCE
from whole_run import GRPO, PPO, SFT, TINY, WholeRun, teacher, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LONG = "num_steps=100000"
# A classifier of steps that the run trains itself, for one step, as nothing is cached.
PRM = ["output_dir=${output_dir}", *TINY, "num_steps=1", "train_batch_size=16"]
PRM += ["rollout.max_response_tokens=8", "tracking=none"]
DEADLINE_S = 45.0  # from the fault to the end of the process, with other work on the cores


@dataclass(frozen=True)
class Fault:
    """`act` is done when step 2 is there; None waits for the run to end by itself."""

    overrides: tuple[str, ...]
    act: Callable[[WholeRun], None] | None


FAULTS = {
    "engine": Fault((*GRPO, LONG, "engine.num_engines=2"), lambda run: run.kill_worker("engine-1")),
    # Its peer's collectives fail before its death is known.
    "trainer": Fault(
        (*SFT, LONG, "trainer.data_parallel_size=2"), lambda run: run.kill_worker("actor-1")
    ),
    "rollout": Fault((*SFT, LONG), lambda run: run.kill_worker("rollout-0")),
    "critic": Fault(
        (*PPO, LONG, "critic.trainer.data_parallel_size=2"),
        lambda run: run.kill_worker("critic-1"),
    ),
    # Its pass runs beside the training of the batch before.
    "teacher": Fault(
        (
            *(*GRPO, LONG, "loop=async", "distillation=topk", "distillation.subset=teacher"),
            *teacher("big", seed=2),
        ),
        lambda run: run.kill_worker("teacher.big-0"),
    ),
    "prm": Fault(
        (*GRPO, LONG, "prm=model", f"prm.model.overrides={PRM}"),
        lambda run: run.kill_worker("prm-0"),
    ),
    "ctrl-c": Fault((*GRPO, LONG), WholeRun.press_ctrl_c),
    "sigterm": Fault((*SFT, LONG), lambda run: run.signal(signal.SIGTERM)),
    "driver": Fault((*SFT, LONG), lambda run: run.signal(signal.SIGKILL)),
    "raising reward": Fault((*GRPO, "reward.parts.own.function._target_=own_rewards.Broken"), None),
    "hanging reward": Fault(
        (
            *GRPO,
            "reward.parts.own.function._target_=own_rewards.Hanging",
            "reward.pool.timeout_s=0.5",
            "reward.pool.max_consecutive_failures=2",
        ),
        None,
    ),
}


@dataclass(frozen=True)
class Ending:
    code: int
    seconds: float  # after the fault
    run: WholeRun


class Endings:
    """All faults happen in the background, a few at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._runs: list[WholeRun] = []
        self._futures: dict[str, Future[Ending]] = {
            name: self._pool.submit(self._happen, name) for name in FAULTS
        }

    def get(self, name: str) -> Ending:
        return self._futures[name].result()

    def _happen(self, name: str) -> Ending:
        fault = FAULTS[name]
        run = WholeRun(self._folder / name.replace(" ", "-"), *fault.overrides)
        self._runs.append(run)
        started = time.monotonic()
        if fault.act is not None:
            run.wait_for_step(2)
            started = time.monotonic()
            fault.act(run)
        code = run.wait()
        return Ending(code, time.monotonic() - started, run)

    def end(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for run in self._runs:
            run.end()


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endings]:
    made = Endings(tmp_path_factory.mktemp("faults"))
    try:
        yield made
    finally:
        made.end()


def message(run: WholeRun) -> str:
    """The one block that stderr ends with."""
    assert "Traceback" not in run.err, run.err
    return run.err.strip().rsplit("\n\n", 1)[-1]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("engine", r"engine\[1\] died during \w+\(\).*its log is \S*/logs/engine-1\.log"),
        ("trainer", r"WorkerDiedError: actor\[1\] died during \w+\(\).*/logs/actor-1\.log"),
        ("critic", r"WorkerDiedError: critic\[1\] died during \w+\(\).*/logs/critic-1\.log"),
        ("teacher", r"WorkerDiedError: teacher\.big\[0\] died during \w+\(\).*teacher\.big-0\.log"),
        ("prm", r"WorkerDiedError: .*prm\[0\] died during classify\(\).*/logs/prm-0\.log"),
        ("rollout", r"WorkerDiedError: rollout\[0\] died during \w+\(\).*/logs/rollout-0\.log"),
    ],
)
def test_a_killed_worker_ends_the_run_by_name(name: str, pattern: str, endings: Endings) -> None:
    ending = endings.get(name)
    assert ending.code == 1 and ending.seconds < DEADLINE_S
    assert re.search(pattern, message(ending.run)), ending.run.err
    assert [found.info.status for found in ending.run.mlflow_runs()] == ["FAILED"]
    ending.run.nothing_is_left()


@pytest.mark.parametrize("name", ["ctrl-c", "sigterm"])
def test_a_stopped_run_says_so(name: str, endings: Endings) -> None:
    ending = endings.get(name)
    assert ending.code == 130 and ending.seconds < DEADLINE_S
    assert message(ending.run) == "interrupted"
    assert [found.info.status for found in ending.run.mlflow_runs()] == ["KILLED"]
    ending.run.nothing_is_left()


def test_no_worker_outlives_a_killed_driver(endings: Endings) -> None:
    """Ray's agents look after their parent now and then; its folder stays, as nobody removes it."""
    ending = endings.get("driver")
    assert ending.code == -signal.SIGKILL
    wait_until(lambda: not ending.run.workers(), 15.0, lambda: "workers are left")
    ending.run.no_process_is_left(timeout_s=120.0)


def test_a_killed_driver_has_failed_and_leaves_its_timeline(endings: Endings) -> None:
    ending = endings.get("driver")
    ending.run.no_process_is_left(timeout_s=120.0)  # its guard included
    assert [found.info.status for found in ending.run.mlflow_runs()] == ["FAILED"]
    assert (ending.run.run_dir / "timeline.json").exists()


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("raising reward", "ValueError: the judge has no licence (own_rewards.py:"),
        ("hanging reward", "no answer within 0.5 s"),
    ],
)
def test_a_reward_that_fails_ends_the_run_with_its_reason(
    name: str, detail: str, endings: Endings
) -> None:
    ending = endings.get(name)
    assert ending.code == 1
    assert message(ending.run).startswith("BudgetError: reward 'own' failed ")
    assert detail in message(ending.run)
    assert [found.info.status for found in ending.run.mlflow_runs()] == ["FAILED"]
    ending.run.nothing_is_left()


# -- faults that are found before anything starts --------------------------------------------------


def refused(folder: Path, *overrides: str) -> str:
    """The message; nothing may have been started or written."""
    run = WholeRun(folder, *overrides)
    try:
        assert run.wait(60.0) == 2, run.err
        assert not list(folder.glob("*.db"))
        return message(run)
    finally:
        run.end()


def test_a_malformed_row_names_file_line_and_field(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": 7, "answer": "3"}\n')
    found = refused(tmp_path, *GRPO, "data=file", f"data.path={rows}")
    assert f"{rows}, line 2: field 'prompt' must be" in found


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    plain = [item for item in GRPO if item not in TINY]
    found = refused(tmp_path, *plain, "model=hf", "model.path=./nowhere")
    assert "model.path: there is no folder './nowhere'" in found


def test_wrong_keys_and_types_are_reported_together(tmp_path: Path) -> None:
    found = refused(tmp_path, *GRPO, "+trainer.learning_rate=1", "trainer.optimizer.lr=fast")
    assert "trainer.learning_rate" in found and "trainer.optimizer.lr" in found


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "step_000002"
    empty.mkdir()
    run = WholeRun(tmp_path / "out", *GRPO, f"resume_from={empty}")
    try:
        assert run.wait(60.0) == 1
        assert f"CheckpointError: {empty} is no complete checkpoint" in message(run)
        run.nothing_is_left()
    finally:
        run.end()
