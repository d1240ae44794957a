"""Many engines behind the rollout worker: spread, retried elsewhere, fenced when dead."""

import asyncio
import re

import pytest
from fake_engine import FakeEngine
from rollout_rig import groups, prompts

from rlpost.errors import BudgetError, RlpostError, WorkerDiedError


async def test_groups_spread_by_load_in_one_submit_per_engine(make_worker):
    engines = [FakeEngine(), FakeEngine()]
    worker = await make_worker(engines)
    asked = [*prompts(1, text="12345678"), *prompts(4)[1:]]
    await groups(worker, asked)
    shares = [[r.request_id for r in engine.submissions[0]] for engine in engines]
    assert [len(engine.submissions) for engine in engines] == [1, 1]
    assert [name.split("#")[0] for name in shares[0][::2]] == ["train:p/0@0", "train:p/3@0"]
    assert [name.split("#")[0] for name in shares[1][::2]] == ["train:p/1@0", "train:p/2@0"]


async def test_a_dead_engine_s_groups_are_retried_elsewhere_with_the_same_seeds(make_worker):
    engines = [FakeEngine(), FakeEngine()]
    worker = await make_worker(engines)
    keys = await worker.begin(prompts(2))
    make_worker.handles[0].dead = True
    assert [(await worker.finish(key)).failure for key in keys] == ["", ""]
    first = [request.seed for request in engines[0].submissions[0]]
    assert [request.seed for request in engines[1].submissions[1]] == first
    await groups(worker, prompts(4)[2:])
    assert len(engines[0].submissions) == 1, "a fenced engine gets no more work"


async def test_when_all_engines_are_dead_no_group_is_tried_any_more(make_worker):
    """A failed group would be drawn again, until a budget is spent."""
    worker = await make_worker([FakeEngine(), FakeEngine()])
    keys = await worker.begin(prompts(2))
    for handle in make_worker.handles:
        handle.dead = True
    results = [await outcome(worker.finish(key)) for key in keys]
    results.append(await outcome(worker.begin(prompts(3)[2:])))
    assert isinstance(results[-1], WorkerDiedError)
    assert re.search(r"none of 2 engines is alive: .*\[0\].*; .*\[1\]", str(results[-1]))


async def outcome(call):
    """What the call raises, or its result."""
    try:
        return await call
    except RlpostError as error:
        return error


async def test_an_engine_that_hangs_is_left_and_the_group_goes_elsewhere(make_worker):
    class Hanging(FakeEngine):
        async def collect(self, request_ids):
            if not self.aborted:
                await asyncio.sleep(60)
            return await super().collect(request_ids)

    engines = [Hanging(), FakeEngine()]
    worker = await make_worker(engines)
    (group,) = await groups(worker, prompts(1))
    assert group.failure == "" and not engines[0].queued and len(engines[0].aborted) == 2


async def test_when_engines_are_only_slow_the_limit_to_raise_is_named(make_worker):
    class Slow(FakeEngine):
        async def collect(self, request_ids):
            if len(request_ids) > 1:  # what was aborted is collected one by one
                await asyncio.sleep(60)
            return await super().collect(request_ids)

    worker = await make_worker([Slow()])
    with pytest.raises(BudgetError, match=r"did not answer.*raise rollout\.attempt_deadline_s"):
        await groups(worker, prompts(4))


async def test_a_missing_answer_is_never_filled_by_position(make_worker):
    class Short(FakeEngine):
        async def collect(self, request_ids):
            return (await super().collect(request_ids))[1:]

    worker = await make_worker([Short()])
    (group,) = await groups(worker, prompts(1))
    assert group.failure == "generation_failed"
