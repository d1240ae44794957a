"""A stream of scored groups under a staleness bound.

Letters: P prompts of a batch, u steps between weight updates, S the bound, d trained batches.

At dispatch: group number n (of those that were not dropped) will be trained in batch n // P, after
(n // P) // u updates; there were d // u when it starts. Its staleness then is at most S if

    n < (d // u + S + 1) * u * P                                         [AReaL, arXiv:2505.24298]

Batches that make no policy version (of the critic only, or of a run that trains no policy) count
like the others: it is also what bounds the groups in flight.
Groups overtake each other, so the bound is checked again at consumption: `drop` evicts a group that
is too old and draws another; `wait` lets the trainer wait for running groups while those that a
batch would leave are more than the batches in which they can still be used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from rlpost.data.ledger import Ledger
from rlpost.loops.batches import Batch
from rlpost.loops.draws import check_draw_budget, draw_prompts
from rlpost.types import GroupHandle, Prompt

OnStale = Literal["drop", "wait"]


@dataclass(frozen=True)
class StreamSettings:
    """The numbers of the bound (letters above); `num_steps` batches are made in all."""

    num_steps: int
    first_step: int
    prompts_per_step: int
    update_weights_interval: int
    max_staleness: int
    on_stale: OnStale
    max_draw_factor: float


@dataclass
class Source:
    """What the stream asks of the driver."""

    ledger: Ledger
    begin: Callable[[list[Prompt], int], Awaitable[list[str]]]
    finish: Callable[[str], Awaitable[GroupHandle]]
    settle: Callable[[GroupHandle], str]


@dataclass(frozen=True)
class Ready:
    """A group that can be trained; `place` is that of its prompt in the order of drawing."""

    place: int
    group: GroupHandle


@dataclass
class RolloutStream:
    """Groups in flight and groups that are ready.

    Tasks: `_pump` is woken when room appears and begins groups; one `_follow` per group waits for
    it. Both end with `close`; the error of any is raised by `take`.
    """

    settings: StreamSettings
    source: Source
    version: int
    _num_trained: int = field(init=False)  # batches of the whole run
    _ready: list[Ready] = field(default_factory=list)
    _dropped: list[tuple[GroupHandle, str]] = field(default_factory=list)
    _started_at: dict[str, int] = field(default_factory=dict)  # key -> version, of those in flight
    _num_drawn: int = 0
    _num_taken: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _error: BaseException | None = None
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._num_trained = self.settings.first_step

    def start(self) -> None:
        self._spawn(self._pump())
        self._room.set()

    def trained(self, version: int) -> None:
        """One more batch is trained, and the engines serve `version`: there may be more room."""
        self._num_trained += 1
        self.version = version
        self._room.set()

    @property
    def num_room(self) -> int:
        """How many groups may begin now."""
        s = self.settings
        updates = self._num_trained // s.update_weights_interval
        reachable = (updates + s.max_staleness + 1) * s.update_weights_interval
        batches = min(reachable, s.num_steps) - s.first_step
        held = self._num_taken + len(self._ready) + len(self._started_at)
        return batches * s.prompts_per_step - held

    async def take(self, step: int) -> Batch:
        """P groups, oldest first; all are within the bound at the present version."""
        while not self._complete(step):
            self._news.clear()
            await self._news.wait()
        size = self.settings.prompts_per_step
        self._ready.sort(key=lambda item: (item.group.oldest_version, item.place))
        oldest, self._ready = self._ready[:size], self._ready[size:]
        chosen = [item.group for item in sorted(oldest, key=lambda item: item.place)]
        self._num_taken += size
        dropped, self._dropped = self._dropped, []
        return Batch.of(
            step,
            chosen,
            dropped,
            generate_s=max(group.generate_s for group in chosen),
            reward_s=max(group.reward_s for group in chosen),
        )

    def _complete(self, step: int) -> bool:
        """Whether the batch can be taken; evicts what is too old. Raises the error of any task."""
        if self._error is not None:
            raise self._error
        self._evict()
        if len(self._ready) < self.settings.prompts_per_step:
            return False
        if not self._started_at:
            return True
        if self.settings.max_staleness == 0:  # its batches are those of the sync loop
            return False
        return self.settings.on_stale == "drop" or self._rest_in_time(step)

    def _rest_in_time(self, step: int) -> bool:
        """Whether batches enough follow for what this one leaves, before that is too old."""
        s = self.settings
        ready = sorted(item.group.oldest_version for item in self._ready)
        left = [*ready[s.prompts_per_step :], *self._started_at.values()]
        same_version = s.update_weights_interval - 1 - step % s.update_weights_interval
        for more in range(s.max_staleness + 1):  # versions until the oldest of these are too old
            oldest = self.version - s.max_staleness + more
            batches = same_version + more * s.update_weights_interval
            if sum(version <= oldest for version in left) > batches * s.prompts_per_step:
                return False
        return True

    def _evict(self) -> None:
        oldest = self.version - self.settings.max_staleness
        stale = [item.group for item in self._ready if item.group.oldest_version < oldest]
        self._ready = [item for item in self._ready if item.group.oldest_version >= oldest]
        for group in stale:
            self.source.ledger.move(group.prompt_key, "evicted")
            self._dropped.append((group, "too_stale"))
        if stale:
            self._check_budget()
            self._room.set()

    async def _pump(self) -> None:
        while True:
            await self._room.wait()
            self._room.clear()
            if (room := self.num_room) > 0:
                await self._begin(room)

    async def _begin(self, count: int) -> None:
        prompts = draw_prompts(self.source.ledger, count)
        version, places = self.version, range(self._num_drawn, self._num_drawn + count)
        self._num_drawn += count
        self._started_at |= {prompt.key: version for prompt in prompts}
        keys = await self.source.begin(prompts, version)
        for key, place in zip(keys, places, strict=True):
            self._spawn(self._follow(key, place))

    async def _follow(self, key: str, place: int) -> None:
        group = await self.source.finish(key)
        del self._started_at[group.prompt_key]
        if reason := self.source.settle(group):
            self._dropped.append((group, reason))
            self._check_budget()
            self._room.set()
        else:
            self._ready.append(Ready(place, group))
        self._news.set()

    def _check_budget(self) -> None:
        check_draw_budget(
            self.settings.first_step + self._num_taken // self.settings.prompts_per_step,
            self.settings.prompts_per_step,
            len(self._ready),
            self._dropped,
            self.settings.max_draw_factor,
        )

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
            self._news.set()

    async def close(self) -> None:
        """Cancels what still runs."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
