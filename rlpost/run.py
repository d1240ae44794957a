"""The composition root: builds everything a run needs, runs its loop, disposes of all of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import yaml

from rlpost.builder import Builder
from rlpost.checkpoint import saved_state
from rlpost.cluster.base import RayCluster
from rlpost.cluster.signals import StopRequest
from rlpost.config import RunConfig, build
from rlpost.errors import StoppedError
from rlpost.objective import objective_of
from rlpost.plan import RunPlan
from rlpost.plan.placement import placements
from rlpost.preparing import check_teachers, prepare_models
from rlpost.rerun import write_rerun
from rlpost.starter import Starter
from rlpost.tracking.base import ChosenTracker, RunStatus, Tracker
from rlpost.tracking.console import ConsoleTracker
from rlpost.tracking.environment import write_environment
from rlpost.tracking.files import FilesTracker
from rlpost.tracking.guard import Guard
from rlpost.tracking.history import HistoryTracker
from rlpost.tracking.last_files import last_files_will, write_last_files
from rlpost.tracking.multi import MultiTracker
from rlpost.tracking.recorder import Recorder
from rlpost.tracking.timeline import Timeline


def run(
    config: RunConfig,
    *,
    plan: RunPlan,
    run_dir: Path,
    compared: bool,
    cluster: RayCluster,
    stop: StopRequest,
) -> float | None:
    """Runs to the end. Raises RlpostError on failure, KeyboardInterrupt when asked to stop.

    `stop` asks to save after the step at hand and to leave, which raises StoppedError.

    Returns the value of `objective` if the run is `compared` with others, as a sweep's job is.

    Whatever happens, workers end and trackers close with the true status.
    """
    console = ConsoleTracker(num_steps=plan.num_steps)
    timeline = Timeline(run_dir / "events.jsonl", on_start=console.phase)
    files = FilesTracker()
    guard = Guard(run_dir / "logs" / "guard.log")
    history = HistoryTracker()
    tracker = MultiTracker(
        [files, console, history],
        chosen_trackers(config, guard),
        summary=console.summary,
        last_files=partial(write_last_files, run_dir),
    )
    with guard, closing(tracker, then=guard.dismiss), stoppable():
        guard.add(last_files_will(run_dir))
        tracker.start(run_name=config.run_name, run_dir=run_dir, params=config.plain())
        for path in [*write_settings(config, plan, run_dir), *write_environment(run_dir)]:
            tracker.artifact(path)
        recorder = Recorder(tracker, timeline)
        with recorder.span("prepare_model"):
            model_paths = prepare_models(config)
            check_teachers(config, model_paths)
        demands = placements(config)
        cluster.check_fits(demands)
        with cluster.running(demands):
            starter = Starter(config, plan, run_dir, model_paths, cluster)
            builder = Builder(config, plan, run_dir, starter, recorder, tracker, stop)
            with stop.before_the_end():
                asyncio.run(builder.run())
        objective = config.objective if compared else None
        return None if objective is None else objective_of(objective, history.values)


def chosen_trackers(config: RunConfig, guard: Guard) -> dict[str, ChosenTracker]:
    """By name. Those that know runs by id go on with theirs when a run is resumed.

    Raises CheckpointError.
    """
    known: dict[str, str] = {}
    if config.resume_from is not None:
        known = saved_state(Path(config.resume_from)).get("tracker_run_ids", {})
    return {
        name: build(section, resume_run_id=known.get(name), leave_will=guard.add)
        for name, section in config.tracking.items()
    }


def write_settings(config: RunConfig, plan: RunPlan, run_dir: Path) -> list[Path]:
    """What was decided and what follows from it, as files for people."""
    settings = run_dir / "config.yaml"
    settings.write_text(yaml.safe_dump(config.plain(), sort_keys=False))
    return [settings, write_rerun(config.plain(), run_dir), *plan.write(run_dir)]


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does: it cancels the loop, or interrupts what runs before it.

    A shell script's background process ignores SIGINT; here that would make SIGTERM ignored too.
    """
    on_int = signal.signal(signal.SIGINT, signal.default_int_handler)
    on_term = signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, on_term)
        signal.signal(signal.SIGINT, on_int)


@contextlib.contextmanager
def closing(tracker: Tracker, *, then: Callable[[], None]) -> Iterator[None]:
    """Closes the tracker with FINISHED, FAILED or KILLED, whatever happens inside; `then` calls.

    What a failed run died of comes before what closing it stumbles over, as on a full disk.
    """
    status: RunStatus = "FAILED"
    try:
        yield
        status = "FINISHED"
    except (KeyboardInterrupt, StoppedError):
        status = "KILLED"
        raise
    finally:
        try:
            tracker.close(status)
        except Exception as error:
            if status == "FINISHED":
                raise
            print(f"closing the trackers: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            then()
