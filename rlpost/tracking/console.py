"""What a person sees: one line a step, live on a terminal, and a summary at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.memory import size
from rlpost.tracking.base import RunStatus
from rlpost.tracking.comparison import Comparison

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

REWARD = "rollout/reward/mean"
ACCURACY = "rollout/accuracy/mean"
LOSS = "train/loss"
TOKENS_PER_S = "perf/generated_tokens_per_s"
STYLES: dict[RunStatus, str] = {"FINISHED": "green", "FAILED": "red", "KILLED": "yellow"}


class ConsoleTracker:
    """Progress of `num_steps` steps. Off a terminal: plain lines, one for each step.

    `phase` may be called from any thread; it shows what the run is doing before its first step
    and, on a terminal, within a step.
    """

    def __init__(self, *, num_steps: int, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console or Console(highlight=False, soft_wrap=True)
        self._num_steps = num_steps
        self._progress: Progress | None = None
        self._started = self._first_log = time.monotonic()
        self._first_step: int | None = None
        self._step = 0
        self._phase = ""
        self._comparison = Comparison()

    def start(self, *, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> None:
        self._started = time.monotonic()
        self._console.print(f"[bold]{run_name}[/]  {_near(str(run_dir))}")
        if self._console.is_terminal:
            self._progress = _progress(self._console)
            self._progress.add_task("starting", total=self._num_steps)
            self._progress.start()

    def phase(self, name: str) -> None:
        if self._progress is not None:
            step = f"step {self._step + 1}/{self._num_steps}"
            self._progress.update(self._progress.task_ids[0], description=f"{step} {name}")
        elif self._first_step is None and name != self._phase:
            self._console.print(f"[dim]{name} ...[/]")
        self._phase = name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._first_step is None:
            self._first_step, self._first_log = step, time.monotonic()
        self._step = step
        self._comparison.add(metrics)
        line = step_line(step, self._num_steps, metrics, self._remaining_s())
        self._console.print(line)
        if memory := memory_line(metrics):
            self._console.print(f"[dim]{memory}[/]")
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def artifact(self, path: Path) -> None:
        """Nothing to show: the summary names what was kept."""

    def close(self, status: RunStatus) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def report(self) -> Mapping[str, str]:
        """Nothing to name: what changed is a table of the summary."""
        return {}

    def summary(self, status: RunStatus, rows: Mapping[str, str]) -> None:
        """Prints the status, what changed, and `rows`; their lines are never wrapped, so that
        commands can be copied."""
        took = duration(time.monotonic() - self._started)
        head = f"{status} at step {self._step}/{self._num_steps} after {took}"
        self._console.print(f"\n[bold {STYLES[status]}]{head}[/]")
        self._print_comparison()
        width = max((len(name) for name in rows), default=0)
        for name, text in rows.items():
            self._console.print(f"  {name:<{width}}  {_near(text)}", markup=False)

    def _print_comparison(self) -> None:
        from rich.table import Table

        table = Table("", "first", "last", box=None, pad_edge=False, padding=(0, 2))
        for label, first, last in self._comparison.rows():
            table.add_row(f"  {label}", f"{first:.3f}", f"{last:.3f}")
        if table.row_count:
            self._console.print(table)

    def _remaining_s(self) -> float | None:
        """Seconds to the last step at the pace so far; None before the second row."""
        done = self._step - (self._first_step or 0)
        if done <= 0:
            return None
        pace = (time.monotonic() - self._first_log) / done
        return pace * (self._num_steps - self._step)


def step_line(
    step: int, num_steps: int, metrics: Mapping[str, float], remaining_s: float | None
) -> str:
    """`step  3/20  reward 0.412  accuracy 0.398  1,204 tokens/s  1m 10s left`"""
    width = len(str(num_steps))
    parts = [f"step {step:>{width}}/{num_steps}"]
    for label, name in (("reward", REWARD), ("accuracy", ACCURACY), ("loss", LOSS)):
        if not math.isnan(metrics.get(name, math.nan)):
            parts.append(f"{label} {metrics[name]:.3f}")
    if TOKENS_PER_S in metrics:
        parts.append(f"{metrics[TOKENS_PER_S]:,.0f} tokens/s")
    parts += [f"eval {name} {value:.3f}" for name, value in accuracies(metrics).items()]
    if remaining_s is not None and step < num_steps:
        parts.append(f"{duration(remaining_s)} left")
    return "  ".join(parts)


def memory_line(metrics: Mapping[str, float]) -> str:
    """`memory, measured / planned:  actor 1.1 GiB / 1.2 GiB`; empty where nothing was measured."""
    parts = []
    for name, value in metrics.items():
        if name.startswith("memory/") and name.endswith("/measured_bytes"):
            role = name.removeprefix("memory/").removesuffix("/measured_bytes")
            planned = metrics.get(f"memory/{role}/planned_bytes")
            parts.append(f"{role} {size(value)} / {'?' if planned is None else size(planned)}")
    return "  ".join(["memory, measured / planned:", *parts]) if parts else ""


def accuracies(metrics: Mapping[str, float]) -> dict[str, float]:
    """Held-out accuracy by data set, from `eval/<data set>/accuracy`."""
    return {
        name.removeprefix("eval/").removesuffix("/accuracy"): value
        for name, value in metrics.items()
        if name.startswith("eval/") and name.endswith("/accuracy") and not math.isnan(value)
    }


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, transient=True)


def _near(text: str) -> str:
    """`text` with the current folder left out."""
    return text.replace(f"{Path.cwd()}/", "")
