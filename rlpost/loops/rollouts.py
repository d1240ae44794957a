"""The driver's side of rollouts: begin prompts, wait for scored groups."""

from __future__ import annotations

from collections.abc import Sequence

from rlpost.cluster.workers import Worker, gather
from rlpost.rollout.requests import Record
from rlpost.types import GroupHandle, Prompt, Sampling


class Rollouts:
    """One rollout worker process that talks to the engines; the driver sees handles only."""

    def __init__(self, worker: Worker, *, group_size: int, deadline_s: float) -> None:
        self.worker = worker
        self._group_size = group_size
        self._deadline_s = deadline_s

    async def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int | None = None,
        sampling: Sampling | None = None,
        record: Record = "train",
        policy_version: int,
    ) -> list[GroupHandle]:
        """Scored groups in the order of `prompts`; all are submitted before any is awaited.

        `group_size` and `sampling` None take those of training. Raises DeadlineError, and what the
        worker raises (see RolloutWorker).
        """
        keys = await self.begin(
            prompts,
            group_size=group_size,
            sampling=sampling,
            record=record,
            policy_version=policy_version,
        )
        return await gather(self.finish(key) for key in keys)

    async def begin(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int | None = None,
        sampling: Sampling | None = None,
        record: Record = "train",
        policy_version: int,
    ) -> list[str]:
        """Submits the prompts' requests in order; returns the keys to `finish` them with."""
        keys: list[str] = await self.worker.call(
            "begin",
            list(prompts),
            group_size=group_size or self._group_size,
            sampling=sampling,
            record=record,
            policy_version=policy_version,
            deadline_s=self._deadline_s,
        )
        return keys

    async def finish(self, key: str) -> GroupHandle:
        """Waits for the group; one that failed says so in `failure`."""
        group: GroupHandle = await self.worker.call("finish", key, deadline_s=self._deadline_s)
        return group
