"""Samples are written beside the next step; an error of a write ends the run, none is lost."""

import asyncio
from types import SimpleNamespace

import pytest

from rlpost.errors import BudgetError, EngineError
from rlpost.loops.batches import Batch
from rlpost.loops.draws import check_draw_budget
from rlpost.loops.records import Records


class Worker:
    """Each write ends when it is let go; `begun` and `done` are steps."""

    def __init__(self, error=None):
        self.error, self.begun, self.done, self.let_go = error, [], [], asyncio.Event()

    async def call(self, method, step, entries, refs, *, deadline_s):
        assert method == "write_samples"
        self.begun.append(step)
        self.entries = entries
        await self.let_go.wait()
        if self.error is not None:
            raise self.error
        self.done.append(step)


def records_of(worker):
    return Records(SimpleNamespace(), SimpleNamespace(), worker, deadline_s=1.0, memory=None)


def batch(step):
    return Batch(step, (), (), generate_s=0.0, reward_s=0.0)


async def test_a_write_runs_beside_the_next_step_and_the_next_write_waits_for_it():
    worker = Worker()
    records = records_of(worker)
    await records.samples(batch(0))
    second = asyncio.create_task(records.samples(batch(1)))
    await asyncio.sleep(0.01)
    assert (worker.begun, worker.done, second.done()) == ([1], [], False)
    worker.let_go.set()
    await second
    await records.wait_for_samples()
    assert worker.done == [1, 2]


async def test_an_error_of_a_write_is_raised_by_whoever_waits_for_it():
    worker = Worker(EngineError("the disk is full"))
    worker.let_go.set()
    records = records_of(worker)
    await records.samples(batch(0))
    with pytest.raises(EngineError, match="the disk is full"):
        await records.samples(batch(1))


async def test_closing_gives_up_a_write_that_hangs():
    records = records_of(Worker())
    await records.samples(batch(0))
    await asyncio.wait_for(records.close(), 1)


async def test_what_was_dropped_for_a_batch_that_can_t_be_filled_is_written():
    worker = Worker()
    worker.let_go.set()
    dropped = [("group", "constant_reward")] * 9
    with pytest.raises(BudgetError, match=r"9 of 9 prompts were dropped \(constant_reward\)"):
        async with records_of(worker).keeping_dropped():
            check_draw_budget(4, 2, 0, dropped, max_draw_factor=4.0)
    assert (worker.done, worker.entries) == ([5], dropped)
