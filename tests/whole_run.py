"""Whole runs as a user starts them: `launch.py` in a process of its own, on a tiny random model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OWN_CODE = Path(__file__).parent / "own_code"  # on the run's PYTHONPATH, as a user's package is
MARK = "RLPOST_TEST_RUN"  # inherited by every process of a run, however it was started

TINY = (
    "model=tiny_init",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_heads=1",
    "model.num_key_value_heads=1",
)
GRPO = (
    "+recipe=grpo_chain",
    *TINY,
    "trusted_prefixes=[rlpost.,own_rewards.]",
    "~reward.parts.exact_match",
    "+reward.parts.own={weight: 1.0, function: {_target_: own_rewards.Digits, wanted: 8}}",
    "reward.accuracy=own",
    "num_steps=10",
    "group_size=4",
    "train_batch_size=16",
    "trainer.data_parallel_size=1",
    "trainer.optimizer.lr=3e-3",
    "rollout.max_response_tokens=8",
    "eval.num_prompts=4",
    "eval.interval=0",
)
PPO = tuple("+recipe=ppo_chain" if part.startswith("+recipe") else part for part in GRPO)
# No engine, so that the run starts quickly; everything else is there.
SFT = (
    "+recipe=sft_chain",
    *TINY,
    "train_batch_size=16",
    "algorithm.num_minibatches=1",
    "trainer.data_parallel_size=1",
)


def teacher(name: str, *, seed: int) -> tuple[str, ...]:
    """A teacher of random weights that are far from the student's."""
    model = f"teachers.{name}.model"
    return (
        f"+model@{model}=tiny_init",
        f"+trainer@teachers.{name}.trainer=megatron",
        f"{model}.model_seed={seed}",
        f"{model}.initializer_range=0.2",
    )


class WholeRun:
    """One launch. `end` closes it, whatever happened, and must find nothing left."""

    def __init__(self, output_dir: Path, *overrides: str) -> None:
        self.output_dir = output_dir
        output_dir.mkdir(parents=True, exist_ok=True)
        self._mark = uuid.uuid4().hex
        # Ray's unix sockets lie below it, and a path of pytest's is too long for those.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="run-"))
        self._paths = {name: output_dir / f"{self._mark}.{name}" for name in ("out", "err")}
        with self._paths["out"].open("w") as out, self._paths["err"].open("w") as err:
            self._process = subprocess.Popen(
                self._command(overrides),
                cwd=self.temp_dir,
                env=self._environment(),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def _command(self, overrides: Sequence[str]) -> list[str]:
        own = [f"output_dir={self.output_dir}", f"run_name={self._mark}"]
        return [sys.executable, str(ROOT / "launch.py"), *overrides, *own]

    def _environment(self) -> dict[str, str]:
        """Whoever else is on the machine may not make Ray end workers, or starve them."""
        return {
            **os.environ,
            MARK: self._mark,
            "PYTHONPATH": str(OWN_CODE),
            "TMPDIR": str(self.temp_dir),
            "OMP_NUM_THREADS": "1",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_worker_niceness": "0",
        }

    # -- what it says and leaves ---------------------------------------------------------------

    @property
    def out(self) -> str:
        return self._paths["out"].read_text()

    @property
    def err(self) -> str:
        return self._paths["err"].read_text()

    @property
    def mark(self) -> str:
        """What the run is called, in its folder, its processes and its configuration."""
        return self._mark

    @property
    def run_dir(self) -> Path:
        """The run's own folder."""
        (found,) = (self.output_dir / self._mark).iterdir()
        return found

    def metrics(self) -> list[dict[str, Any]]:
        """One mapping for each step; the first is that of the eval before training, if any."""
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def steps(self) -> dict[int, dict[str, Any]]:
        return {row["step"]: row for row in self.metrics() if "train/loss" in row}

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.steps().values()]

    def checkpoint(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / f"step_{step:06d}"

    def mlflow_runs(self) -> list[Any]:
        """The runs in the store of `output_dir`."""
        client = self.mlflow_client()
        (experiment,) = client.search_experiments(filter_string="name = 'rlpost'")
        return list(client.search_runs([experiment.experiment_id]))

    def mlflow_client(self) -> Any:
        from mlflow.tracking import MlflowClient

        return MlflowClient(f"sqlite:///{self.output_dir}/mlflow.db")

    # -- its processes -------------------------------------------------------------------------

    def processes(self) -> list[int]:
        """Every living process of the run, daemons of Ray and reward processes included."""
        return [
            pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if self._owns(pid)
        ]

    def _owns(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (OSError, ProcessLookupError):
            return False
        zombie = stat.rsplit(")", 1)[1].split()[0] == "Z"
        return f"{MARK}={self._mark}".encode() in environment and not zombie

    def workers(self) -> list[int]:
        """Those of `processes` that write to a worker's log."""
        logs = os.path.realpath(self.run_dir / "logs")
        return [pid for pid in self.processes() if _output_of(pid).startswith(logs)]

    def worker(self, name: str) -> int:
        """Process id of a worker, e.g. `engine-0`: the one that writes to its log."""
        log = os.path.realpath(self.run_dir / "logs" / f"{name}.log")
        (pid,) = [pid for pid in self.processes() if _output_of(pid) == log]
        return pid

    def kill_worker(self, name: str) -> None:
        os.kill(self.worker(name), signal.SIGKILL)

    def signal(self, number: int) -> None:
        """To the launched process alone."""
        self._process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """What a terminal does: every process of the foreground group gets the signal."""
        os.killpg(self._process.pid, signal.SIGINT)

    # -- waiting -------------------------------------------------------------------------------

    def wait_for_step(self, step: int, timeout_s: float = 600.0) -> None:
        """Until the metrics of `step` are there; the run must still go on then."""
        wait_until(lambda: self._reached(step), timeout_s, lambda: f"step {step}: {self.err}")
        assert self._process.poll() is None, self.err

    def _reached(self, step: int) -> bool:
        if self._process.poll() is not None:
            return True
        found = list(self.output_dir.glob(f"{self._mark}/*/metrics.jsonl"))
        return bool(found) and f'"step": {step},' in found[0].read_text()

    def wait(self, timeout_s: float = 600.0) -> int:
        """Exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            self.end()
            raise AssertionError(
                f"still running after {timeout_s} s\n{self.out}\n{self.err}"
            ) from error

    def finished(self) -> WholeRun:
        """The run, after it ended well."""
        assert self.wait() == 0, self.err
        return self

    def nothing_is_left(self, timeout_s: float = 15.0) -> None:
        """No process and none of Ray's folders, soon after the end."""
        self.no_process_is_left(timeout_s)
        assert not list(self.temp_dir.glob("rlpost-ray-*"))

    def no_process_is_left(self, timeout_s: float = 30.0) -> None:
        wait_until(lambda: not self.processes(), timeout_s, self._left)

    def _left(self) -> str:
        return "\n".join(_command_of(pid) for pid in self.processes())

    def end(self) -> None:
        for pid in self.processes():
            _kill(pid)
        self._process.wait()
        shutil.rmtree(self.temp_dir, ignore_errors=True)


def wait_until(holds: Callable[[], bool], timeout_s: float, message: Callable[[], str]) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, message()
        time.sleep(0.1)


def same_files(one: Path, other: Path, names: Sequence[str]) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def _output_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
