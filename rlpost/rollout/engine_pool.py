"""Spreads groups over engine replicas, collects their answers, retries elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlpost.cluster.workers import Worker
from rlpost.errors import EngineError
from rlpost.rollout.base import Attempts
from rlpost.rollout.replicas import RETRIED, Replica, Replicas
from rlpost.types import GenerateRequest, Generation

DISCARD_DEADLINE_S = 10.0  # a wedged engine must not hold up the retry elsewhere


@dataclass(eq=False)
class Ticket:
    """The requests of one group and where they are. `attempt` counts submissions from 0."""

    requests: tuple[GenerateRequest, ...]
    replica: Replica | None = None
    attempt: int = 0
    tried: set[int] = field(default_factory=set)
    error: Exception | None = None  # of the submission; raised when the answers are wanted

    @property
    def cost_tokens(self) -> int:
        """An upper bound of the tokens the engine has to hold for this group."""
        return sum(
            len(request.token_ids) + request.sampling.max_tokens for request in self.requests
        )

    def sent(self) -> list[GenerateRequest]:
        """The requests under this attempt's ids. Seeds stay: a retry samples the same."""
        return [
            replace(request, request_id=f"{request.request_id}~{self.attempt}")
            for request in self.requests
        ]


class EnginePool:
    """Groups go to the replica with the least to do; one whose process died gets no more."""

    def __init__(self, engines: Sequence[Worker], attempts: Attempts) -> None:
        self._attempts = attempts
        self._replicas = Replicas(engines)

    async def submit(self, tickets: Sequence[Ticket]) -> None:
        """One call per engine with all its requests. A failure waits in the ticket."""
        shares: dict[int, list[Ticket]] = {}
        for ticket in tickets:
            ticket.replica = self._replicas.pick(ticket.tried)
            ticket.replica.load += ticket.cost_tokens
            shares.setdefault(ticket.replica.place, []).append(ticket)
        await asyncio.gather(*(self._send(share) for share in shares.values()))

    async def collect(self, ticket: Ticket) -> list[Generation]:
        """[G] answers in request order.

        Raises EngineError when every attempt has failed, WorkerDiedError when all engines are dead.
        """
        while True:
            try:
                return await self._collect_once(ticket)
            except RETRIED as error:
                await self._give_up(ticket, error)
                if ticket.attempt + 1 >= self._attempts.max_attempts:
                    raise EngineError(
                        f"{ticket.attempt + 1} attempts failed; the last one: {error}"
                        f"{self._attempts.hint(error)}"
                    ) from error
            ticket.attempt += 1
            ticket.error = None
            await self.submit([ticket])

    async def _collect_once(self, ticket: Ticket) -> list[Generation]:
        replica = placed(ticket)
        try:
            if ticket.error is not None:
                raise ticket.error
            ids = [request.request_id for request in ticket.sent()]
            answers = await replica.worker.call(
                "collect", ids, deadline_s=self._attempts.deadline_s
            )
            return checked(ids, {answer.request_id: answer for answer in answers})
        finally:
            replica.load -= ticket.cost_tokens

    async def _send(self, tickets: Sequence[Ticket]) -> None:
        requests = [request for ticket in tickets for request in ticket.sent()]
        worker = placed(tickets[0]).worker
        try:
            await worker.call("submit", requests, deadline_s=self._attempts.deadline_s)
        except RETRIED as error:
            for ticket in tickets:
                ticket.error = error

    async def _give_up(self, ticket: Ticket, error: Exception) -> None:
        """Leaves the engine without this group's work, as far as it still answers."""
        replica = placed(ticket)
        ticket.tried.add(replica.place)
        if replica.fence_if_dead(error):
            return
        names = [request.request_id for request in ticket.sent()]
        await asyncio.gather(*(discard(replica.worker, name) for name in names))


async def discard(worker: Worker, request_id: str) -> None:
    """One by one, because an engine refuses a list that holds an unknown request."""
    with contextlib.suppress(*RETRIED):
        await worker.call("abort", [request_id], deadline_s=DISCARD_DEADLINE_S)
        await worker.call("collect", [request_id], deadline_s=DISCARD_DEADLINE_S)


def placed(ticket: Ticket) -> Replica:
    assert ticket.replica is not None, "the ticket was never submitted"
    return ticket.replica


def checked(ids: Sequence[str], answers: Mapping[str, Generation]) -> list[Generation]:
    """The answers in the order of `ids`. Raises EngineError on a missing or ragged one."""
    missing = [name for name in ids if name not in answers]
    if missing:
        raise EngineError(f"no answer for {len(missing)} of {len(ids)} requests: {missing[:3]}")
    for name in ids:
        one = answers[name]
        sizes = {len(one.token_ids), len(one.logprobs), len(one.policy_versions)}
        if len(sizes) > 1:
            raise EngineError(f"tokens, log-probs and versions of {name} differ in length: {sizes}")
    return [answers[name] for name in ids]
