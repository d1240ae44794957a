"""The calls to MLflow's client: one store, one run, writes that are tried again when it is busy."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpost.tracking.background import Row
from rlpost.tracking.base import RunStatus
from rlpost.tracking.environment import git_commit
from rlpost.tracking.guard import Will
from rlpost.tracking.last_files import present_last_files
from rlpost.tracking.mlflow_words import entity_name, flatten, param_value

PARAMS_PER_CALL = 100  # MLflow's limits on one batch
METRICS_PER_CALL = 1000
DRIVER_TAG = "rlpost.driver"
ATTEMPTS = 6
FIRST_WAIT_S = 0.2


class MlflowRun:
    """One open run of a store. `driver` names the process that writes it now."""

    def __init__(self, client: Any, run_id: str, driver: str) -> None:
        self._client = client
        self.run_id = run_id
        self.driver = driver

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        entries = [
            Metric(entity_name(name), float(value), row.time_ms, row.step)
            for row in rows
            for name, value in row.metrics.items()
        ]
        for start in range(0, len(entries), METRICS_PER_CALL):
            part = entries[start : start + METRICS_PER_CALL]
            retried(self._client.log_batch, self.run_id, metrics=part)

    def params(self, params: Mapping[str, Any]) -> None:
        """Writes nested params flat. A resumed run keeps those that it already has."""
        from mlflow.entities import Param

        known = retried(self._client.get_run, self.run_id).data.params
        flat = {entity_name(name): value for name, value in flatten(params).items()}
        entries = [
            Param(name, param_value(value)) for name, value in flat.items() if name not in known
        ]
        for start in range(0, len(entries), PARAMS_PER_CALL):
            part = entries[start : start + PARAMS_PER_CALL]
            retried(self._client.log_batch, self.run_id, params=part)

    def artifact(self, path: Path) -> None:
        if path.is_dir():
            retried(self._client.log_artifacts, self.run_id, str(path), path.name)
        else:
            retried(self._client.log_artifact, self.run_id, str(path))

    def end(self, status: RunStatus) -> None:
        retried(self._client.set_terminated, self.run_id, status)


def open_run(
    *,
    tracking_uri: str,
    artifact_dir: str | None,
    experiment: str,
    run_name: str,
    tags: Mapping[str, str],
    params: Mapping[str, Any],
    resume_run_id: str | None,
) -> MlflowRun:
    """Opens the store, finds or makes the experiment and the run, and writes the params.

    One process at a time, for a store in a file: two that make its tables at once collide.
    """
    import_mlflow()  # seconds, for which the runs that start beside this one need not wait
    with _alone(tracking_uri), few_retries():
        client = _client(tracking_uri)
        experiment_id = retried(_experiment_id, client, experiment, artifact_dir)
    driver = uuid.uuid4().hex
    run_id = _known_run(client, resume_run_id)
    if run_id is None:
        every = {**source_tags(), **tags, DRIVER_TAG: driver}
        created = retried(client.create_run, experiment_id, run_name=run_name, tags=every)
        run_id = str(created.info.run_id)
    else:
        retried(client.set_tag, run_id, DRIVER_TAG, driver)
    run = MlflowRun(client, run_id, driver)
    run.params(params)
    return run


def source_tags() -> dict[str, str]:
    """What MLflow's tables show of a run: by whom, with which program, from which commit."""
    tags = {
        "mlflow.user": user_name(),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": sys.argv[0],
    }
    commit = git_commit()
    return tags if commit is None else {**tags, "mlflow.source.git.commit": commit}


def user_name() -> str:
    """The login name, or the number of a user without one, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def lost_run_will(tracking_uri: str, run: MlflowRun, run_dir: Path) -> Will:
    """That the guard ends the run should its driver be killed."""
    arguments = {
        "tracking_uri": tracking_uri,
        "run_id": run.run_id,
        "driver": run.driver,
        "run_dir": str(run_dir.absolute()),
    }
    return Will(f"{__name__}.{end_lost_run.__name__}", arguments)


def end_lost_run(*, tracking_uri: str, run_id: str, driver: str, run_dir: str) -> None:
    """FAILED, with the last files, unless the run ended or another driver has resumed it."""
    client = _client(tracking_uri)
    found = retried(client.get_run, run_id)
    if found.info.status != "RUNNING" or found.data.tags.get(DRIVER_TAG) != driver:
        return
    run = MlflowRun(client, run_id, driver)
    run.end("FAILED")
    for path in present_last_files(run_dir):
        run.artifact(path)


def retried(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls; waits and tries again when another run holds the SQLite file."""
    for attempt in range(ATTEMPTS):
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if "database is locked" not in str(error) or attempt == ATTEMPTS - 1:
                raise
            time.sleep(FIRST_WAIT_S * 2**attempt)
    raise AssertionError("unreachable")


@contextlib.contextmanager
def few_retries() -> Iterator[None]:
    """A server that is not there is told at once; MLflow's own retries take minutes, which suits
    one that is gone for a moment later on. Who sets the variable decides."""
    key = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    if key in os.environ:
        yield
        return
    os.environ[key] = "2"
    try:
        yield
    finally:
        del os.environ[key]


def import_mlflow() -> Any:
    # Read by mlflow when it is imported.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import tracking

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return tracking


def _client(tracking_uri: str) -> Any:
    return import_mlflow().MlflowClient(tracking_uri)


def _experiment_id(client: Any, name: str, artifact_dir: str | None) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        place = None if artifact_dir is None else Path(artifact_dir).absolute().as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another run made it in between
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise ValueError(
            f"experiment {name!r} was deleted; restore it (mlflow experiments restore "
            f"--experiment-id {found.experiment_id}) or set tracking.mlflow.experiment to another "
            "name"
        )
    return str(found.experiment_id)


def _known_run(client: Any, run_id: str | None) -> str | None:
    """`run_id`, set to running again, or None when this store has no such run."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    try:
        retried(client.get_run, run_id)
    except MlflowException:
        return None
    retried(client.update_run, run_id, status="RUNNING")
    return run_id


@contextlib.contextmanager
def _alone(tracking_uri: str) -> Iterator[None]:
    """Holds a lock beside the SQLite file; other stores look after themselves."""
    scheme, _, place = tracking_uri.partition(":///")
    if scheme != "sqlite":
        yield
        return
    path = Path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
