"""The calls to MLflow's client: one store, one run, writes that are tried again when it is busy."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpost.tracking.background import Row
from rlpost.tracking.base import RunStatus

PARAMS_PER_CALL = 100  # MLflow's limits on one batch and on the length of a value
METRICS_PER_CALL = 1000
NAME_LENGTH = 250
PARAM_LENGTH = 6000
CUT = "..."  # ends a value that was too long
ATTEMPTS = 6
FIRST_WAIT_S = 0.2
NOT_ALLOWED = re.compile(r"[^\w\-. :/]")


class MlflowRun:
    """One open run of a store."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self.run_id = run_id

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

        known = self._client.get_run(self.run_id).data.params
        flat = {entity_name(name): value for name, value in flatten(params).items()}
        entries = [
            Param(name, cut(str(value), PARAM_LENGTH))
            for name, value in flat.items()
            if name not in known
        ]
        for start in range(0, len(entries), PARAMS_PER_CALL):
            part = entries[start : start + PARAMS_PER_CALL]
            retried(self._client.log_batch, self.run_id, params=part)

    def artifact(self, path: Path) -> None:
        log = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        retried(log, self.run_id, str(path))

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
    with _alone(tracking_uri):
        client = _client(tracking_uri)
        experiment_id = retried(_experiment_id, client, experiment, artifact_dir)
    run_id = _known_run(client, resume_run_id)
    if run_id is None:
        created = retried(client.create_run, experiment_id, run_name=run_name, tags=dict(tags))
        run_id = str(created.info.run_id)
    run = MlflowRun(client, run_id)
    run.params(params)
    return run


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys: {"loop": {"colocate": True}} -> {"loop.colocate": True}."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: value} if prefix else {}
    flat: dict[str, Any] = {}
    for key, entry in value.items():
        flat |= flatten(entry, f"{prefix}.{key}" if prefix else str(key))
    return flat


def entity_name(name: str) -> str:
    """`name` as MLflow takes it; of one that is too long the end, which tells most."""
    return NOT_ALLOWED.sub("_", name)[-NAME_LENGTH:]


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - len(CUT)] + CUT


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


def _client(tracking_uri: str) -> Any:
    # Read by mlflow when it is imported.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri)


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
            f"--experiment-id {found.experiment_id}) or set tracking.experiment to another name"
        )
    return str(found.experiment_id)


def _known_run(client: Any, run_id: str | None) -> str | None:
    """`run_id`, set to running again, or None when this store has no such run."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    try:
        client.get_run(run_id)
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
