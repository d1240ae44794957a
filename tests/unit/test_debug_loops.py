"""The loops of one half of a step, against a driver whose parts only note what they are asked."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

from rlpost.loops.driver import Driver
from rlpost.loops.intake import Intake
from rlpost.loops.records import Records
from rlpost.loops.rollout_only import RolloutOnly
from rlpost.loops.schedule import Schedule
from rlpost.loops.train_only import TrainOnly
from rlpost.types import GroupHandle, Prompt


def group(key):
    return GroupHandle(
        prompt_key=key,
        sample_ids=(f"{key}#0",),
        block=f"block of {key}",
        rewards=(1.0,),
        accuracies=(1.0,),
        lengths=(5,),
        loss_tokens=(3,),
        finish_reasons=("stop",),
        oldest_version=0,
        verdict_counts={"ok": 1},
        generate_s=0.5,
        reward_s=0.0,
    )


class Worker:
    """The rollout worker, or the saved samples in its place."""

    def __init__(self):
        self.written, self.read = [], []

    async def call(self, method, *args, deadline_s):
        if method == "groups":
            self.read.append(args[0])
            return [group(f"p{args[0]}@0")]
        if method == "write_samples":
            step, entries, _ = args
            self.written.append((step, [reason for _, reason in entries]))
        return None


class Rollouts:
    def __init__(self):
        self.worker = Worker()

    async def generate(self, prompts, *, policy_version):
        return [group(prompt.key) for prompt in prompts]


class Ledger:
    num_drawn = 0

    def __init__(self):
        self.moves = []
        self.counts = {}

    def draw(self):
        self.num_drawn += 1
        return Prompt(f"p{self.num_drawn}", epoch=0, index=self.num_drawn)

    def move(self, key, state):
        self.moves.append(state)

    def check(self):
        return None

    def in_flight(self):
        return {}


class Recorder:
    def __init__(self):
        self.rows, self.row = [], {}

    def span(self, name):
        return nullcontext()

    def add(self, metrics):
        self.row |= metrics

    def add_time(self, name, seconds):
        self.row[f"time/{name}_s"] = seconds

    def rate(self, name, amount, phase):
        self.row[name] = amount

    def flush(self, step):
        self.rows.append({"step": step, **self.row})
        self.row = {}


class Trainers:
    async def run_passes(self, batch):
        return batch

    async def train(self, batch):
        return batch, {"train/loss": float(batch.step), "perf/trained_tokens": 3.0}


def run(loop):
    schedule = Schedule(
        num_steps=2,
        steps_per_epoch=2,
        prompts_per_step=1,
        num_minibatches=1,
        num_ppo_epochs=1,
        num_critic_only_steps=0,
        trains_policy=True,
        step_deadline_s=1.0,
    )
    ledger, rollouts, recorder = Ledger(), Rollouts(), Recorder()
    driver = Driver(
        schedule=schedule,
        trainers=Trainers(),
        engines=[],
        rollouts=rollouts,
        ledger=ledger,
        intake=Intake(ledger, rollouts, prompts_per_step=1, scored=True, drop_constant=False),
        records=Records(recorder, ledger, rollouts.worker, deadline_s=1.0, memory=None),
        weight_sync=None,
        evaluator=None,
        checkpointer=None,
        recorder=recorder,
        tracker_run_ids={},
    )
    asyncio.run(loop.run(driver))
    return driver


def test_rollout_only_writes_scored_groups_and_trains_nothing():
    driver = run(RolloutOnly(max_draw_factor=2.0))
    assert driver.rollouts.worker.written == [(1, ["admitted"]), (2, ["admitted"])]
    assert [row["step"] for row in driver.recorder.rows] == [1, 2]
    assert all(row["perf/generated_tokens_per_s"] == 3 for row in driver.recorder.rows)
    assert "trained" not in driver.ledger.moves
    assert not any("train/loss" in row for row in driver.recorder.rows)


def test_train_only_reads_each_step_and_publishes_versions_to_nobody():
    driver = run(TrainOnly())
    assert driver.rollouts.worker.read == [1, 2]
    assert driver.rollouts.worker.written == [(1, ["trained"]), (2, ["trained"])]
    assert [row["train/loss"] for row in driver.recorder.rows] == [0.0, 1.0]
    assert [row["policy/staleness/max"] for row in driver.recorder.rows] == [0.0, 1.0]
    assert driver.policy_version == 2
    assert driver.ledger.num_drawn == 0
