"""The errors a user can meet. All are picklable: they cross process borders inside Ray."""

from __future__ import annotations


class RlpostError(Exception):
    """Base of every error that rlpost raises on purpose. The message names the way out."""


class ConfigError(RlpostError):
    """The configuration is wrong. `problems`: one line each; all are reported at once."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)
        self.problems = list(problems)

    def __str__(self) -> str:
        head = f"{len(self.problems)} configuration problem{'s'[: len(self.problems) != 1]}:"
        return "\n  - ".join([head, *self.problems])


class DataError(RlpostError):
    """A data row, file or task is wrong; the message names file, line and field."""


class ModelError(RlpostError):
    """A model folder is missing, unreadable or of an unsupported architecture."""


class EngineError(RlpostError):
    """An inference engine failed or refused a request."""


class TrainerError(RlpostError):
    """A trainer rank failed or was given an impossible batch."""


class WeightSyncError(RlpostError):
    """A policy version did not reach an engine intact."""


class CheckpointError(RlpostError):
    """A checkpoint is incomplete, damaged or does not belong to this run."""


class TrackingError(RlpostError):
    """A tracker could not start, so the run would leave no record there."""


class BudgetError(RlpostError):
    """Too many failures of one kind (reward, generation, filter, non-finite gradients)."""


class ClusterError(RlpostError):
    """Ray did not come up, so no worker could be started."""


class DeadlineError(RlpostError):
    """A remote wait passed its deadline; the message says who waited for whom, and how long."""


class WorkerDiedError(RlpostError):
    """A worker process ended before it answered; the message names role and rank."""


class StoppedError(RlpostError):
    """A scheduler's warning was heeded: the run has saved and left before its last step."""
