"""The verbs every loop is written in. One driver per run; it holds handles and small scalars."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.cluster.signals import StopRequest

if TYPE_CHECKING:
    from rlpost.checkpoint import Checkpointer
    from rlpost.cluster.workers import Worker
    from rlpost.data.ledger import Ledger
    from rlpost.loops.batches import Batch
    from rlpost.loops.evaluation import Evaluator
    from rlpost.loops.intake import Intake
    from rlpost.loops.profiler import Profiler
    from rlpost.loops.records import Records
    from rlpost.loops.rollouts import Rollouts
    from rlpost.loops.schedule import Schedule
    from rlpost.loops.trainers import Trainers
    from rlpost.loops.turns import Turns
    from rlpost.tracking.recorder import Recorder
    from rlpost.weight_sync.transaction import WeightSync

STOP_DEADLINE_S = 10.0  # for a worker to end by itself


@dataclass
class Driver:
    """Services of a run and its position. `step` counts finished batches."""

    schedule: Schedule
    trainers: Trainers
    engines: list[Worker]
    rollouts: Rollouts
    ledger: Ledger
    intake: Intake
    records: Records
    weight_sync: WeightSync | None
    evaluator: Evaluator | None
    checkpointer: Checkpointer
    recorder: Recorder
    tracker_run_ids: dict[str, str]
    turns: Turns | None = None  # where engines and trainers share devices
    profiler: Profiler | None = None
    step: int = 0
    policy_version: int = 0
    resumed: bool = False
    last_checkpoint: Path | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    leaving: bool = False  # before the last step, as the stop request asks

    async def _engines_turn(self) -> None:
        if self.turns is not None:
            await self.turns.to_engines()

    async def _trainers_turn(self) -> None:
        if self.turns is not None:
            await self.turns.to_trainers()

    # -- a batch and its training -------------------------------------------------------------

    async def take_batch(self, step: int, *, max_draw_factor: float) -> Batch:
        """The batch of `step`: draws until it is full, replacing what can't be trained."""
        await self._engines_turn()
        return await self.intake.batch(
            step, policy_version=self.policy_version, max_draw_factor=max_draw_factor
        )

    async def run_early_passes(self, batch: Batch) -> Batch:
        """What frozen roles can compute on the batch while the actor trains on the one before."""
        return await self.trainers.run_early_passes(batch)

    async def run_passes(self, batch: Batch) -> Batch:
        """The batch with all columns that the plan of passes adds."""
        await self._trainers_turn()
        return await self.trainers.run_passes(batch)

    async def train(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with its advantages and returns after its optimizer steps, and the metrics."""
        trained = await self.trainers.train(batch)
        self.step += 1
        return trained

    # -- the frame of a run ------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.leaving or self.step >= self.schedule.num_steps

    async def start(self) -> None:
        """Gives the engines the actor's weights, compared in full, and evaluates a fresh run."""
        if self.stop.came:
            self.leaving = True
            return
        await self.publish(full=True)
        if not self.resumed:
            await self.eval_if_due()
            self.recorder.flush(self.step)
        await self.profile()

    async def finish_step(
        self, batch: Batch, metrics: dict[str, float], *, staleness: float
    ) -> None:
        """Records the step, saves and evaluates if due. When asked to stop, saves and leaves."""
        self.record(batch, metrics, staleness=staleness)
        await self.records.samples(batch)
        await self.records.measure_memory()
        leaving = self.stop.came and self.step < self.schedule.num_steps
        await self.save_if_due(leaving=leaving)
        if not leaving:
            await self.eval_if_due()
        self.recorder.flush(self.step)
        await self.profile()
        self.leaving = leaving

    def record(self, batch: Batch, metrics: dict[str, float], *, staleness: float) -> None:
        """Everything of one finished step that is known without waiting."""
        for group in batch.groups:
            self.ledger.move(group.prompt_key, "trained")
        self.records.rollouts(batch)
        self.records.training(metrics, staleness=staleness, policy_version=self.policy_version)

    async def wait_for_samples(self) -> None:
        """The last thing of a run: what is still written beside the next step has no next one."""
        await self.records.wait_for_samples()

    async def profile(self) -> None:
        """Between two steps: recording begins or ends, if it is due."""
        if self.profiler is not None:
            await self.profiler.after(self.step)

    # -- publish, save, eval -----------------------------------------------------------------

    async def publish_update(self) -> None:
        """The optimizer's last update becomes a policy version, and reaches the engines.

        A batch that trained no policy has made no version: nothing happens.
        """
        if not self.schedule.makes_version(self.step - 1):
            return
        self.policy_version += 1
        await self.publish()

    async def publish(self, *, full: bool = False) -> None:
        """One weight-update transaction: engines serve `policy_version` when it returns."""
        if self.weight_sync is None:
            return
        await self._trainers_turn()
        with self.recorder.span("weight_sync"):
            timings = await self.weight_sync.push(
                self.policy_version,
                self.trainers.actor.group,
                self.engines,
                full=full,
                on_prepared=self.turns.admit_weights if self.turns else None,
                on_loaded=self.turns.admit_kv_cache if self.turns else None,
            )
        self.recorder.add({f"time/weight_sync/{name}_s": value for name, value in timings.items()})

    async def save_if_due(self, *, leaving: bool = False) -> None:
        if not leaving and not self.checkpointer.due(
            self.step,
            epoch_end=self.schedule.is_epoch_end(self.step),
            last=self.schedule.is_last(self.step),
        ):
            return
        await self._trainers_turn()
        with self.recorder.span("save"):
            self.last_checkpoint = await self.checkpointer.save(
                self.step,
                roles={name: role.group for name, role in self.trainers.trained.items()},
                exports={
                    f"{name}_hf" if name != "actor" else "hf": name
                    for name in self.trainers.trained
                },
                state=self.state_dict(),
            )

    async def eval_if_due(self) -> None:
        if self.evaluator is None or not self.evaluator.due(
            self.step,
            epoch_end=self.schedule.is_epoch_end(self.step),
            last=self.schedule.is_last(self.step),
        ):
            return
        await self._engines_turn()
        with self.recorder.span("eval"):
            self.recorder.add(await self.evaluator.run(self.rollouts, self.policy_version))

    # -- resume ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The driver's part of a checkpoint."""
        return {
            "step": self.step,
            "policy_version": self.policy_version,
            "tracker_run_ids": self.tracker_run_ids,
            "ledger": self.ledger.state_dict(),
        }

    async def resume(self, folder: Path) -> None:
        """Goes on from a checkpoint: weights, optimizer, data position and policy version."""
        await self._trainers_turn()
        groups = {name: role.group for name, role in self.trainers.trained.items()}
        state = await self.checkpointer.load(folder, roles=groups)
        self.step = int(state["step"])
        self.policy_version = int(state["policy_version"])
        self.ledger.load_state_dict(state["ledger"])
        self.resumed = True

    async def dispose(self) -> None:
        """Gives up pending work and lets engines and the reward pool end by themselves."""
        await self.records.close()
        stops = [worker.call("shutdown", deadline_s=STOP_DEADLINE_S) for worker in self.engines]
        stops.append(self.rollouts.worker.call("close", deadline_s=STOP_DEADLINE_S))
        # A worker that can't end by itself is ended with its cluster.
        await asyncio.gather(*stops, return_exceptions=True)
