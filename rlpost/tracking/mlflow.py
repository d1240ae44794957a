"""MLflow as a tracker. All its work happens on one thread, so that the loop never waits for it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from rlpost.errors import TrackingError
from rlpost.tracking.base import RunStatus
from rlpost.tracking.mlflow_store import MlflowRun, open_run

logger = logging.getLogger(__name__)

Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class MlflowTrackerConfig:
    """`tracking_uri` names the store; `artifact_dir` is for a new experiment only."""

    tracking_uri: Text
    artifact_dir: str | None
    experiment: Text
    max_queued: PositiveInt
    start_timeout_s: PositiveFloat
    close_timeout_s: PositiveFloat

    def __post_init__(self) -> None:
        if "://" not in self.tracking_uri:
            raise ValueError(
                f"tracking_uri ({self.tracking_uri!r}) must be an address such as "
                f"'sqlite:///outputs/mlflow.db' or 'http://host:5000'"
            )


@dataclass(frozen=True, slots=True)
class _Row:
    step: int
    time_ms: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class _End:
    status: RunStatus


class MlflowTracker:
    """One MLflow run. A store that can't be opened is an error; trouble later is a warning.

    The thread opens the run, then consumes the queue (rows, artefacts, the end) and is woken by
    it; the end stops it. Rows that can't be written are left out there and counted in
    `tracking/dropped/count`: training goes on, and metrics.jsonl has them.
    With `resume_run_id` the run of that id goes on, if the store knows it.
    """

    Config = MlflowTrackerConfig

    def __init__(self, config: MlflowTrackerConfig, *, resume_run_id: str | None = None) -> None:
        self.config = config
        self._resume_run_id = resume_run_id
        self._queue: queue.Queue[_Row | Path | _End] = queue.Queue(config.max_queued)
        self._opened = threading.Event()
        self._thread: threading.Thread | None = None
        self._run: MlflowRun | None = None
        self._start_error: Exception | None = None
        self._dropped = 0
        self._warned = False

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run. Waits for the start; raises TrackingError when that failed."""
        return self._started_run().run_id

    def start(self, *, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> None:
        """Returns at once; a failure to start is raised by the first `log`."""
        arguments = (run_name, run_dir, params)
        self._thread = threading.Thread(
            target=self._work, args=arguments, name="mlflow", daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._started_run()
        self._put(_Row(step, int(time.time() * 1000), dict(metrics)))

    def artifact(self, path: Path) -> None:
        self._started_run()
        self._put(path)

    def close(self, status: RunStatus) -> None:
        """Writes what is queued, then the status. Never raises: the run's own error comes first."""
        if self._thread is None:
            return
        try:
            self._started_run()
        except TrackingError as error:
            logger.warning("%s", error)
            return
        deadline = time.monotonic() + self.config.close_timeout_s
        try:
            self._queue.put(_End(status), timeout=self.config.close_timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass  # the thread is stuck: told below
        if self._thread.is_alive():
            logger.warning(
                "MLflow did not finish within %g s (tracking.close_timeout_s); its run may lack "
                "the last metrics and the status %s",
                self.config.close_timeout_s,
                status,
            )

    def report(self) -> Mapping[str, str]:
        if self._run is None:
            return {}
        lines = {"MLflow run": f"{self.config.experiment} / {self._run.run_id}"}
        if self._dropped:
            lines["MLflow lacks"] = f"{self._dropped} rows that could not be written"
        uri = self.config.tracking_uri
        if uri.startswith("http"):
            return lines | {"MLflow UI": uri}
        return lines | {"MLflow UI": f".venv/bin/mlflow ui --workers 1 --backend-store-uri {uri}"}

    def _started_run(self) -> MlflowRun:
        assert self._thread is not None, "start() has not been called"
        if not self._opened.wait(self.config.start_timeout_s):
            raise TrackingError(
                f"MLflow did not open {self.config.tracking_uri} within "
                f"{self.config.start_timeout_s:g} s; raise tracking.start_timeout_s, or run with "
                f"tracking=none"
            )
        if self._run is None:
            raise TrackingError(
                f"MLflow could not start a run at {self.config.tracking_uri}: "
                f"{self._start_error}; correct tracking.tracking_uri, or run with tracking=none"
            ) from self._start_error
        return self._run

    def _put(self, item: _Row | Path) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._drop(f"{self.config.max_queued} rows wait (tracking.max_queued)")

    def _drop(self, reason: str) -> None:
        self._dropped += 1
        if not self._warned:
            self._warned = True
            logger.warning(
                "MLflow lacks metrics from here on, training goes on and metrics.jsonl has them: "
                "%s",
                reason,
            )

    # -- on the thread -----------------------------------------------------------------------

    def _work(self, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> None:
        try:
            self._run = open_run(
                tracking_uri=self.config.tracking_uri,
                artifact_dir=self.config.artifact_dir,
                experiment=self.config.experiment,
                run_name=run_name,
                tags={"run_dir": str(run_dir)},
                params=params,
                resume_run_id=self._resume_run_id,
            )
        except Exception as error:  # raised in the loop's thread by `_started_run`
            self._start_error = error
            return
        finally:
            self._opened.set()
        self._consume(self._run)

    def _consume(self, run: MlflowRun) -> None:
        while True:
            item = self._queue.get()
            try:
                self._write(run, item)
            except Exception as error:
                self._drop(f"{type(error).__name__}: {error}")
            if isinstance(item, _End):
                return

    def _write(self, run: MlflowRun, item: _Row | Path | _End) -> None:
        if isinstance(item, _Row):
            counted = {"tracking/dropped/count": float(self._dropped)} if self._dropped else {}
            run.log(item.step, item.time_ms, item.metrics | counted)
        elif isinstance(item, _End):
            run.end(item.status)
        else:
            run.artifact(item)
