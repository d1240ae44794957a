"""The stream of groups: bound, exact refill, order, errors. Generation is faked, time is not."""

import asyncio
import random

import pytest

from rlpost.data.ledger import Ledger
from rlpost.errors import BudgetError, EngineError
from rlpost.loops.draws import book
from rlpost.loops.report import staleness_max
from rlpost.loops.stream import RolloutStream, Source, StreamSettings
from rlpost.types import GroupHandle, Prompt

PROMPTS_PER_STEP = 4


class Prompts:
    """An endless enough data set."""

    name = "fake"

    def __len__(self):
        return 1000

    def get(self, epoch, index):
        return Prompt(f"p{index}", epoch, index, text="x")


class Engines:
    """Answers each prompt after a while, under the version it was begun with."""

    def __init__(self, *, seconds=lambda key: 0.0, drop=lambda key: False, fail=()):
        self.ledger = Ledger(Prompts(), num_epochs=None, num_prompts=None)
        self.seconds, self.drop, self.fail = seconds, drop, fail
        self.versions = {}
        self.begun = []  # sizes of the calls of begin

    async def begin(self, prompts, version):
        self.begun.append(len(prompts))
        self.versions.update((prompt.key, version) for prompt in prompts)
        return [prompt.key for prompt in prompts]

    async def finish(self, key):
        await asyncio.sleep(self.seconds(key))
        if key in self.fail:
            raise EngineError(f"engine lost {key}")
        return GroupHandle(
            prompt_key=key, sample_ids=(f"{key}#0",), block=None, rewards=(1.0,),
            accuracies=(1.0,), lengths=(3,), loss_tokens=(2,), finish_reasons=("stop",),
            oldest_version=self.versions[key], verdict_counts={}, generate_s=0.0, reward_s=0.0,
        )  # fmt: skip

    def settle(self, group):
        reason = "constant_reward" if self.drop(group.prompt_key) else ""
        book(self.ledger, group, reason)
        return reason


def stream_of(
    engines,
    *,
    num_steps=12,
    max_staleness=1,
    on_stale="wait",
    interval=1,
    factor=50.0,
    first_step=0,
    version=0,
):
    settings = StreamSettings(
        num_steps=num_steps,
        first_step=first_step,
        prompts_per_step=PROMPTS_PER_STEP,
        update_weights_interval=interval,
        max_staleness=max_staleness,
        on_stale=on_stale,
        max_draw_factor=factor,
    )
    source = Source(engines.ledger, engines.begin, engines.finish, engines.settle)
    return RolloutStream(settings, source, version)


async def train(stream, engines, *, num_steps=12, interval=1, train_s=0.002, no_version=0):
    """Takes and trains all batches, the first of which make no version.

    Returns (batches, staleness of each).
    """
    stream.start()
    batches, staleness, version = [], [], stream.version
    for step in range(stream.settings.first_step, num_steps):
        batch = await asyncio.wait_for(stream.take(step), 5)
        staleness.append(staleness_max(batch, version))
        await asyncio.sleep(train_s)
        for group in batch.groups:
            engines.ledger.move(group.prompt_key, "trained")
        engines.ledger.check()
        batches.append(batch)
        if (step + 1) % interval == 0 and step >= no_version:
            version += 1
        stream.trained(version)
    await stream.close()
    return batches, staleness


def long_tailed(key):
    """Most answers take 1 ms, every tenth takes 20."""
    return random.Random(key).choice([0.001] * 9 + [0.02])


@pytest.mark.parametrize("on_stale", ["drop", "wait"])
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("bound", [0, 1, 4])
async def test_no_batch_exceeds_the_bound_with_very_unequal_answers(bound, interval, on_stale):
    engines = Engines(seconds=long_tailed)
    stream = stream_of(engines, max_staleness=bound, on_stale=on_stale, interval=interval)
    _, staleness = await train(stream, engines, interval=interval)
    assert max(staleness) <= bound


@pytest.mark.parametrize("no_version", [5, 12])
@pytest.mark.parametrize("bound", [0, 1])
async def test_batches_that_make_no_version_stop_no_stream_and_do_not_flood_it(bound, no_version):
    """Of the critic only, or all batches of a run that trains no policy."""
    engines = Engines(seconds=long_tailed)
    stream = stream_of(engines, max_staleness=bound)
    batches, staleness = await train(stream, engines, no_version=no_version)
    assert len(batches) == 12
    assert max(staleness) <= bound
    assert max(engines.begun) <= (bound + 1) * PROMPTS_PER_STEP


async def test_a_bound_above_zero_is_used():
    engines = Engines(seconds=long_tailed)
    _, staleness = await train(stream_of(engines, max_staleness=4), engines)
    assert max(staleness) > 0


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("bound", [1, 2, 4])
async def test_waiting_evicts_nothing(bound, interval):
    engines = Engines(seconds=long_tailed)
    stream = stream_of(engines, max_staleness=bound, on_stale="wait", interval=interval)
    batches, _ = await train(stream, engines, interval=interval)
    assert not any(batch.dropped for batch in batches)
    assert engines.ledger.counts["evicted"] == 0


async def test_waiting_leaves_no_more_old_groups_than_batches_that_can_use_them():
    """Twelve groups of version 0 have three batches; newer ones are ready before eight of them."""
    engines = Engines(seconds=lambda key: 0.05 if 4 <= int(key[1:-2]) < 12 else 0.0)
    stream = stream_of(engines, max_staleness=2, on_stale="wait", num_steps=6)
    batches, _ = await train(stream, engines, num_steps=6)
    assert engines.ledger.counts["evicted"] == 0
    used = [sum(engines.versions[g.prompt_key] == 0 for g in batch.groups) for batch in batches]
    assert sum(used[:3]) == 12


async def test_a_run_resumed_between_two_updates_evicts_nothing():
    """After step 3, with an update after every second step: version 1 serves one more batch."""
    engines = Engines()
    stream = stream_of(engines, max_staleness=0, interval=2, first_step=3, version=1)
    batches, _ = await train(stream, engines, interval=2)
    assert not any(batch.dropped for batch in batches)


async def test_dropping_evicts_what_is_too_old_and_says_so():
    engines = Engines()
    stream = stream_of(engines, on_stale="drop")
    answer = engines.finish

    async def finish(key):
        while key == "p1@0" and stream.version < 3:
            await asyncio.sleep(0.001)
        return await answer(key)

    stream.source.finish = finish
    batches, _ = await train(stream, engines)
    reasons = [(group.prompt_key, reason) for batch in batches for group, reason in batch.dropped]
    assert reasons == [("p1@0", "too_stale")]
    assert engines.ledger.counts["evicted"] == 1


async def test_a_slow_group_does_not_hold_back_groups_that_are_ready():
    engines = Engines(seconds=lambda key: 3.0 if key.startswith("p0@") else 0.001)
    stream = stream_of(engines, max_staleness=4, on_stale="drop")
    stream.start()
    batch = await asyncio.wait_for(stream.take(0), 1)
    await stream.close()
    assert "p0@0" not in [group.prompt_key for group in batch.groups]


async def test_a_slow_group_is_waited_for_only_where_an_update_follows():
    """Updates follow batches 1 and 3; p0 of version 0 has to be in batch 3 at the latest."""
    engines = Engines(seconds=lambda key: 0.3 if key.startswith("p0@") else 0.001)
    stream = stream_of(engines, max_staleness=1, interval=2)
    stream.start()
    batches = []
    for step, version in enumerate((0, 1, 1)):
        batches.append(await asyncio.wait_for(stream.take(step), 0.2))
        stream.trained(version)
    batches.append(await stream.take(3))
    await stream.close()
    held = [[group.prompt_key for group in batch.groups] for batch in batches]
    assert ["p0@0" in keys for keys in held] == [False, False, False, True]


async def test_bound_zero_trains_the_batches_of_the_sync_loop_in_its_order():
    engines = Engines(seconds=long_tailed)
    batches, _ = await train(stream_of(engines, max_staleness=0), engines)
    drawn = [group.prompt_key for batch in batches for group in batch.groups]
    assert drawn == [f"p{row}@0" for row in range(12 * PROMPTS_PER_STEP)]
    assert engines.begun == [PROMPTS_PER_STEP] * 12


async def test_dropped_groups_are_replaced_exactly_and_the_surplus_is_kept():
    engines = Engines(seconds=long_tailed, drop=lambda key: hash_of(key) % 3 == 0)
    batches, _ = await train(stream_of(engines, max_staleness=4), engines)
    assert all(len(batch.groups) == PROMPTS_PER_STEP for batch in batches)
    counts = engines.ledger.counts
    assert counts["trained"] == 12 * PROMPTS_PER_STEP
    assert engines.ledger.num_drawn == counts["trained"] + counts["filtered"]


def hash_of(key):
    return random.Random(key).randrange(1000)


async def test_no_more_groups_are_drawn_than_the_run_will_train():
    engines = Engines()
    await train(stream_of(engines, num_steps=3, max_staleness=4), engines, num_steps=3)
    assert engines.ledger.num_drawn == 3 * PROMPTS_PER_STEP


async def test_an_error_in_any_group_ends_the_run_with_that_error():
    engines = Engines(fail={"p2@0"})
    with pytest.raises(EngineError, match="engine lost p2@0"):
        await train(stream_of(engines), engines)


async def test_a_drop_beside_a_full_queue_is_no_reason_to_stop():
    engines = Engines(drop=lambda key: key == "p35@0")
    batches, _ = await train(stream_of(engines, max_staleness=9, factor=8.0), engines)
    assert [group.prompt_key for batch in batches for group, _ in batch.dropped] == ["p35@0"]


async def test_dropping_everything_stops_the_run():
    engines = Engines(drop=lambda key: True)
    with pytest.raises(BudgetError, match="constant_reward"):
        await train(stream_of(engines, factor=4.0), engines)


async def test_evicting_everything_stops_the_run():
    """As engines that never get new weights would have it, where the policy's version goes on."""
    engines = Engines()
    begin = engines.begin

    async def begin_under_the_first_version(prompts, version):
        return await begin(prompts, 0)

    engines.begin = begin_under_the_first_version
    with pytest.raises(BudgetError, match=r"too_stale.*loop\.max_draw_factor"):
        await train(stream_of(engines, max_staleness=1, on_stale="drop", factor=3.0), engines)
