"""Whole runs as Slurm jobs, and what Slurm says about them."""

from __future__ import annotations

import os
import re
import subprocess
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from whole_run import WholeRun, wait_until

NODES = (
    "cluster=slurm",
    "cluster.num_nodes=2",
    "cluster.num_cpus_per_node=2",
    "cluster.object_store_bytes=100000000",
    "cluster.time_limit_min=10",
    "cluster.signal_delay_s=60",
)
TWO_NODES = (*NODES, "+cluster.nodes.engine=[1]", "+cluster.nodes.actor=[0]")
SCHEDULED_S = 90.0


def slurm(*words: str, **options: Any) -> str:
    """What a command of Slurm prints."""
    return subprocess.run(words, check=True, capture_output=True, text=True, **options).stdout


def job(job_id: str) -> dict[str, str]:
    """`scontrol show job`, as key -> value."""
    return dict(re.findall(r"(\w+)=(\S*)", slurm("scontrol", "show", "job", job_id, "--oneliner")))


def ends_in(job_id: str, seconds: float) -> None:
    """Moves the time limit of a running job, which Slurm looks at every half minute."""
    end = datetime.now() + timedelta(seconds=seconds)
    slurm("scontrol", "update", f"JobId={job_id}", f"EndTime={end:%Y-%m-%dT%H:%M:%S}")


def signals_tasks_alone() -> bool:
    """And not also what they have started, until SIGKILL."""
    config = slurm("scontrol", "show", "config")
    return bool(re.search(r"^ProctrackType\s*= proctrack/cgroup$", config, re.MULTILINE))


class SlurmRun(WholeRun):
    """A launch that ends up in a job. Its processes there carry its mark too."""

    @property
    def run_dir(self) -> Path:
        """The folder of the job's run, wherever it is: that of the launch holds no plan."""
        (plan,) = self._written("plan.json")
        return plan.parent

    def _written(self, name: str) -> list[Path]:
        """The files of that name in runs' folders, and not the copies that MLflow keeps."""
        found = self.output_dir.rglob(name)
        return [path for path in found if "mlflow_artifacts" not in path.parts]

    def _reached(self, step: int) -> bool:
        rows = self._written("metrics.jsonl")
        return bool(rows) and f'"step": {step},' in rows[0].read_text()

    @property
    def name(self) -> str:
        """Of its jobs."""
        return self._mark

    def jobs(self) -> list[str]:
        """Ids of its jobs that are pending, running or ending."""
        return slurm("squeue", "--noheader", "--format=%i", f"--name={self.name}").split()

    def last_step(self) -> int:
        return max(self.steps(), default=0)

    def sbatch(self, script: Path) -> str:
        """Submits with the run's environment. The job's id."""
        environment = {**os.environ, **self._environment()}
        return slurm("sbatch", "--parsable", str(script), env=environment).strip()

    def nodes_of(self, *workers: str) -> list[str]:
        """Slurm's name of the node on which each of these runs now."""
        return [_variable(self.worker(name), "SLURMD_NODENAME") for name in workers]

    def wait_until_in_job(self, step: int, job_id: str, timeout_s: float = 200.0) -> None:
        def said() -> str:
            return f"step {step} of job {job_id}: {job(job_id)}\n{self.said()}"

        wait_until(lambda: self._reached(step), timeout_s, said)

    def said(self) -> str:
        """By the launch and by the tasks of the job."""
        logs = list(self.output_dir.rglob("*.out"))
        return "\n".join([self.err, *(f"== {log}\n{log.read_text()}" for log in logs)])

    def start_again_now(self, job_id: str) -> None:
        """Slurm lets a job that was queued again wait for two minutes; this one need not."""
        wait_until(lambda: job(job_id)["Restarts"] == "1", SCHEDULED_S, self.said)
        wait_until(lambda: job(job_id)["JobState"] == "PENDING", SCHEDULED_S, self.said)
        slurm("scontrol", "update", f"JobId={job_id}", "StartTime=now")

    def end(self) -> None:
        subprocess.run(["scancel", f"--name={self.name}"], check=False)
        super().end()


def _variable(pid: int, name: str) -> str:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (value,) = [item for item in entries if item.startswith(f"{name}=".encode())]
    return value.decode().partition("=")[2]
