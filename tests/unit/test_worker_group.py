"""Which failure of several ranks is told: the cause, not what it did to the others."""

import asyncio

import pytest

from rlpost.cluster import workers
from rlpost.cluster.workers import WorkerGroup
from rlpost.errors import TrainerError, WorkerDiedError


class Rank:
    """Fails with `error` after a while; without one it waits for ever."""

    def __init__(self, error=None, *, after=0.0):
        self.error, self.after, self.cancelled = error, after, False

    async def call(self, method, *, deadline_s):
        try:
            await asyncio.sleep(self.after if self.error else deadline_s)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        raise self.error


BROKEN = RuntimeError("Connection closed by peer")


async def fail(*ranks):
    await WorkerGroup("actor", ranks).call("train", deadline_s=60.0)


async def test_the_death_of_a_rank_is_told_before_what_its_peers_saw_of_it():
    waiting = Rank()
    with pytest.raises(WorkerDiedError, match=r"actor\[1\] died") as caught:
        await fail(Rank(BROKEN), Rank(WorkerDiedError("actor[1] died"), after=0.05), waiting)
    assert caught.value.__cause__ is BROKEN and waiting.cancelled


async def test_an_error_of_all_ranks_is_told_at_once():
    with pytest.raises(RuntimeError, match="Connection closed"):
        await asyncio.wait_for(fail(Rank(BROKEN), Rank(BROKEN, after=0.05)), 5.0)


async def test_without_a_death_a_rank_that_waits_on_does_not_hide_the_error(monkeypatch):
    monkeypatch.setattr(workers, "DEATH_NOTICE_S", 0.05)
    waiting = Rank()
    with pytest.raises(RuntimeError, match="Connection closed"):
        await asyncio.wait_for(fail(Rank(BROKEN), waiting), 5.0)
    assert waiting.cancelled


async def test_an_error_raised_on_purpose_waits_for_nobody():
    with pytest.raises(TrainerError):
        await asyncio.wait_for(fail(Rank(TrainerError("no rows")), Rank()), 5.0)
