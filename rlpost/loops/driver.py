"""The verbs every loop is written in. One driver per run; it holds handles and small scalars."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.cluster.signals import StopRequest
from rlpost.cluster.workers import gather
from rlpost.loops import report
from rlpost.loops.batches import Batch, drop_reason, view_for
from rlpost.loops.draws import book, check_draw_budget, draw_prompts
from rlpost.loops.passes import Pass, check_delivered, early, rounds
from rlpost.metrics import merge, results
from rlpost.types import BatchView, GroupHandle, PassResult, StoredBlock

if TYPE_CHECKING:
    from rlpost.checkpoint import Checkpointer
    from rlpost.cluster.workers import Worker, WorkerGroup
    from rlpost.data.ledger import Ledger
    from rlpost.loops.evaluation import Evaluator
    from rlpost.loops.memory_report import MemoryReport
    from rlpost.loops.rollouts import Rollouts
    from rlpost.loops.turns import Turns
    from rlpost.prm.credit import CreditConfig
    from rlpost.tracking.recorder import Recorder
    from rlpost.trainers.base import TrainResult
    from rlpost.weight_sync.transaction import WeightSync


TRAINED = ("actor", "critic")


@dataclass(frozen=True)
class Schedule:
    """Batch arithmetic of the run, fixed before it starts."""

    num_steps: int
    steps_per_epoch: int
    prompts_per_step: int
    num_minibatches: int
    num_ppo_epochs: int
    num_critic_only_steps: int
    step_deadline_s: float

    def is_last(self, step: int) -> bool:
        return step == self.num_steps

    def trains_actor(self, step: int) -> bool:
        """Whether batch number `step` (from 0) trains the actor, or the critic only."""
        return step >= self.num_critic_only_steps

    def is_epoch_end(self, step: int) -> bool:
        return step > 0 and step % self.steps_per_epoch == 0


@dataclass(frozen=True)
class Role:
    """A trainer role: its ranks and how many rows-takers (data-parallel ranks) they form."""

    group: WorkerGroup
    data_parallel_size: int


@dataclass
class Driver:
    """Services of a run and its position. `step` counts finished batches.

    `critic_passes` take the place of `passes` on a batch that trains the critic only.
    """

    schedule: Schedule
    passes: tuple[Pass, ...]
    critic_passes: tuple[Pass, ...]
    roles: dict[str, Role]
    engines: list[Worker]
    rollouts: Rollouts
    ledger: Ledger
    weight_sync: WeightSync | None
    evaluator: Evaluator | None
    checkpointer: Checkpointer
    recorder: Recorder
    tracker_run_ids: dict[str, str]
    scored: bool
    drop_constant: bool
    turns: Turns | None = None  # where engines and trainers share devices
    credit: CreditConfig | None = None  # of process rewards, where they make advantages
    memory: MemoryReport | None = None  # not measured yet
    step: int = 0
    policy_version: int = 0
    resumed: bool = False
    last_checkpoint: Path | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    leaving: bool = False  # before the last step, as the stop request asks
    _writing: asyncio.Task[None] | None = None

    @property
    def actor(self) -> Role:
        return self.roles["actor"]

    @property
    def trained(self) -> dict[str, Role]:
        """The roles with an optimizer: what a checkpoint holds and a resume restores."""
        return {name: role for name, role in self.roles.items() if name in TRAINED}

    async def _engines_turn(self) -> None:
        if self.turns is not None:
            await self.turns.to_engines()

    async def _trainers_turn(self) -> None:
        if self.turns is not None:
            await self.turns.to_trainers()

    # -- take a batch ------------------------------------------------------------------------

    async def take_batch(self, step: int, *, max_draw_factor: float) -> Batch:
        """The batch of `step`: draws until it is full, replacing what can't be trained."""
        await self._engines_turn()
        wanted = self.schedule.prompts_per_step
        kept: list[GroupHandle] = []
        dropped: list[tuple[GroupHandle, str]] = []
        generate_s = 0.0
        started = time.monotonic()
        while len(kept) < wanted:
            check_draw_budget(step, wanted, len(kept), dropped, max_draw_factor)
            generate_s += await self._draw_round(wanted - len(kept), kept, dropped)
        # Scoring runs beside generation; what counts is the time it adds after the last answer.
        reward_s = max(0.0, time.monotonic() - started - generate_s)
        return Batch.of(step, kept, dropped, generate_s=generate_s, reward_s=reward_s)

    async def _draw_round(
        self, count: int, kept: list[GroupHandle], dropped: list[tuple[GroupHandle, str]]
    ) -> float:
        """One round of `count` prompts; returns the seconds until the last answer was there."""
        prompts = draw_prompts(self.ledger, count)
        groups = await self.rollouts.generate(prompts, policy_version=self.policy_version)
        for group in groups:
            if reason := self.settle(group):
                dropped.append((group, reason))
            else:
                kept.append(group)
        return max(group.generate_s for group in groups)

    def settle(self, group: GroupHandle) -> str:
        """Books a finished group; returns why it is dropped, or "" when it can be trained."""
        reason = drop_reason(group, scored=self.scored, drop_constant=self.drop_constant)
        book(self.ledger, group, reason)
        return reason

    # -- passes and training -----------------------------------------------------------------

    async def run_early_passes(self, batch: Batch) -> Batch:
        """What frozen roles can compute on the batch while the actor trains on the one before."""
        return await self._run_side_by_side(batch, early(self._passes_of(batch), TRAINED))

    async def run_passes(self, batch: Batch) -> Batch:
        """The batch with all columns that the plan of passes adds."""
        await self._trainers_turn()
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
        self.step += 1
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

    async def finish_step(
        self, batch: Batch, metrics: dict[str, float], *, staleness: float
    ) -> None:
        """Records the step, saves and evaluates if due. When asked to stop, saves and leaves."""
        self.record(batch, metrics, staleness=staleness)
        await self.write_samples(batch)
        await self._measure_memory()
        leaving = self.stop.came and self.step < self.schedule.num_steps
        await self.save_if_due(leaving=leaving)
        if not leaving:
            await self.eval_if_due()
        self.recorder.flush(self.step)
        self.leaving = leaving

    # -- publish, save, eval -----------------------------------------------------------------

    async def publish_update(self) -> None:
        """The optimizer's last update becomes a policy version, and reaches the engines.

        A batch that trained the critic only has made no new policy: nothing happens.
        """
        if not self.schedule.trains_actor(self.step - 1):
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
                self.actor.group,
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
                roles={name: role.group for name, role in self.trained.items()},
                exports={f"{name}_hf" if name != "actor" else "hf": name for name in self.trained},
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

    # -- records -----------------------------------------------------------------------------

    def record(self, batch: Batch, metrics: dict[str, float], *, staleness: float) -> None:
        """Everything of one finished step that is known without waiting."""
        for group in batch.groups:
            self.ledger.move(group.prompt_key, "trained")
        self.record_rollouts(batch)
        self.record_training(metrics, staleness=staleness)

    def record_rollouts(self, batch: Batch) -> None:
        self.ledger.check()
        self.recorder.add(report.rollout_metrics(batch) | report.ledger_metrics(self.ledger))
        self.recorder.add_time("generate", batch.generate_s)
        self.recorder.add_time("reward", batch.reward_s)
        generated = report.generated_tokens(batch)
        self.recorder.add({"perf/generated_tokens": float(generated)})
        self.recorder.rate("perf/generated_tokens_per_s", generated, "generate")

    def record_training(self, metrics: dict[str, float], *, staleness: float) -> None:
        trained = metrics.get("perf/trained_tokens", 0.0)
        position = {
            "policy/version": float(self.policy_version),
            "policy/staleness/max": staleness,
            "perf/trained_tokens": trained,
        }
        self.recorder.add(metrics | position)
        self.recorder.rate("perf/trained_tokens_per_s", trained, "train")

    async def write_samples(self, batch: Batch, reason: str = "trained") -> None:
        """Writes the step's samples beside the next step's work; the one before has to be done."""
        await self.wait_for_samples()
        entries = [(group, reason) for group in batch.groups] + list(batch.dropped)
        call = self.rollouts.worker.call(
            "write_samples",
            batch.step + 1,
            entries,
            tuple(block.ref for block in batch.blocks),
            deadline_s=self.schedule.step_deadline_s,
        )
        self._writing = asyncio.ensure_future(call)

    async def _measure_memory(self) -> None:
        """Once, after the first step."""
        if self.memory is not None:
            self.recorder.add(await self.memory.measure())
            self.memory = None

    async def wait_for_samples(self) -> None:
        if self._writing is not None:
            await self._writing
            self._writing = None

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
        groups = {name: role.group for name, role in self.trained.items()}
        state = await self.checkpointer.load(folder, roles=groups)
        self.step = int(state["step"])
        self.policy_version = int(state["policy_version"])
        self.ledger.load_state_dict(state["ledger"])
        self.resumed = True

    async def dispose(self) -> None:
        """Gives up pending work and lets engines and the reward pool end by themselves."""
        if self._writing is not None:
            self._writing.cancel()
        stops = [worker.call("shutdown", deadline_s=10.0) for worker in self.engines]
        stops.append(self.rollouts.worker.call("close", deadline_s=10.0))
        await asyncio.gather(*stops, return_exceptions=True)
