"""The trainer roles of a run: passes that add columns to a batch, and its optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost.cluster.workers import gather
from rlpost.loops.batches import Batch, view_for
from rlpost.loops.passes import Pass, check_delivered, early, rounds
from rlpost.metrics import merge, results
from rlpost.types import BatchView, PassResult, StoredBlock

if TYPE_CHECKING:
    from rlpost.cluster.workers import WorkerGroup
    from rlpost.loops.schedule import Schedule
    from rlpost.prm.credit import CreditConfig
    from rlpost.tracking.recorder import Recorder
    from rlpost.trainers.base import TrainResult


TRAINED = ("actor", "critic")


@dataclass(frozen=True)
class Role:
    """A trainer role: its ranks and how many rows-takers (data-parallel ranks) they form."""

    group: WorkerGroup
    data_parallel_size: int


@dataclass(frozen=True)
class Trainers:
    """`critic_passes` take the place of `passes` on a batch that trains the critic only.

    `credit` says how scores of steps make advantages, where they do.
    """

    schedule: Schedule
    passes: tuple[Pass, ...]
    critic_passes: tuple[Pass, ...]
    roles: dict[str, Role]
    credit: CreditConfig | None
    recorder: Recorder

    @property
    def actor(self) -> Role:
        return self.roles["actor"]

    @property
    def trained(self) -> dict[str, Role]:
        """The roles with an optimizer: what a checkpoint holds and a resume restores."""
        return {name: role for name, role in self.roles.items() if name in TRAINED}

    async def run_early_passes(self, batch: Batch) -> Batch:
        """What frozen roles can compute on the batch while the actor trains on the one before."""
        return await self._run_side_by_side(batch, early(self._passes_of(batch), TRAINED))

    async def run_passes(self, batch: Batch) -> Batch:
        """The batch with all columns that the plan of passes adds."""
        with self.recorder.span("logprobs"):
            for ready in rounds(self._passes_of(batch), batch.done):
                batch = await self._run_side_by_side(batch, ready)
        return batch

    def _passes_of(self, batch: Batch) -> tuple[Pass, ...]:
        return self.passes if self.schedule.trains_actor(batch.step) else self.critic_passes

    async def _run_side_by_side(self, batch: Batch, passes: Sequence[Pass]) -> Batch:
        made = await gather(self._run_pass(batch, item) for item in passes)
        return batch.with_blocks((block for blocks in made for block in blocks), passes)

    async def _run_pass(self, batch: Batch, item: Pass) -> list[StoredBlock | None]:
        role = self.roles[item.role]
        if item.teacher is not None:
            batch = batch.routed_to(item.teacher)
            if not batch.groups:
                return []
        view = self._view(batch, role)
        parts: list[PassResult] = await role.group.call(
            item.method, view, item.name, deadline_s=self.schedule.step_deadline_s
        )
        check_delivered(item, parts, view)
        self.recorder.add_time(item.name, max(part.seconds for part in parts))
        return [part.block for part in parts]

    async def train(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch's optimizer steps, of all trained roles at the same time.

        Returns the batch with its advantages and returns, and the metrics of all ranks.
        """
        names = [
            name
            for name in self.trained
            if name != "actor" or self.schedule.trains_actor(batch.step)
        ]
        with self.recorder.span("train"):
            trained = await gather(self._train_role(batch, self.roles[name]) for name in names)
        metrics: dict[str, float] = {}
        for name, parts in zip(names, trained, strict=True):
            batch = batch.with_blocks(part.block for part in parts)
            metrics |= results(merge(part.metrics for part in parts))
            area = "train" if name == "actor" else name
            metrics[f"{area}/skipped_steps"] = float(parts[0].skipped_steps)
            self.recorder.add_time(f"train_{name}", max(part.seconds for part in parts))
        return batch, metrics

    async def _train_role(self, batch: Batch, role: Role) -> list[TrainResult]:
        view = self._view(batch, role, num_visits=self.schedule.num_ppo_epochs)
        results: list[TrainResult] = await role.group.call(
            "train", view, deadline_s=self.schedule.step_deadline_s
        )
        return results

    def _view(self, batch: Batch, role: Role, *, num_visits: int = 1) -> BatchView:
        return view_for(
            batch,
            data_parallel_size=role.data_parallel_size,
            num_minibatches=self.schedule.num_minibatches,
            num_visits=num_visits,
            credit=self.credit,
        )
