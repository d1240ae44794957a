"""MLflow as a tracker: one MLflow run for each of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt

from rlpost.tracking.background import BackgroundTracker
from rlpost.tracking.guard import Will
from rlpost.tracking.mlflow_store import MlflowRun, lost_run_will, open_run
from rlpost.tracking.sweep_file import name_among_jobs, parent_run

MLFLOW_PARENT = "mlflow.parentRunId"
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
        if urlsplit(self.tracking_uri).password:
            raise ValueError(
                "tracking_uri holds a password, which every record of the run would show; set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment instead, "
                "or what the data base's client reads, such as PGPASSFILE"
            )


class MlflowTracker(BackgroundTracker):
    """With `resume_run_id` the run of that id goes on, if the store knows it."""

    Config = MlflowTrackerConfig

    def __init__(
        self,
        config: MlflowTrackerConfig,
        *,
        resume_run_id: str | None,
        leave_will: Callable[[Will], None],
    ) -> None:
        super().__init__(
            "MLflow",
            max_queued=config.max_queued,
            start_timeout_s=config.start_timeout_s,
            close_timeout_s=config.close_timeout_s,
        )
        self.config = config
        self._resume_run_id = resume_run_id
        self._leave_will = leave_will
        self._run: MlflowRun | None = None

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run. Waits for the start; raises TrackingError when that failed."""
        self._wait_for_start()
        assert self._run is not None
        return self._run.run_id

    def report(self) -> Mapping[str, str]:
        if self._run is None:
            return {}
        uri = self.config.tracking_uri
        command = f".venv/bin/mlflow ui --workers 1 --backend-store-uri {uri}"
        place = uri if uri.startswith("http") else command
        return {
            "MLflow run": f"{self.config.experiment} / {self._run.run_id}",
            **super().report(),
            "MLflow UI": place,
        }

    def _open(self, run_name: str, run_dir: Path, params: Mapping[str, Any]) -> MlflowRun:
        parent = parent_run(run_dir, self.config.tracking_uri)
        child = {} if parent is None else {MLFLOW_PARENT: parent}
        self._run = open_run(
            tracking_uri=self.config.tracking_uri,
            artifact_dir=self.config.artifact_dir,
            experiment=self.config.experiment,
            run_name=f"{run_name} {name_among_jobs(run_dir)}" if child else run_name,
            tags={"run_dir": str(run_dir), **child},
            params=params,
            resume_run_id=self._resume_run_id,
        )
        self._leave_will(lost_run_will(self.config.tracking_uri, self._run, run_dir))
        return self._run
