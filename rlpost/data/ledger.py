"""The prompt ledger: where every prompt that was drawn is now, and that none is lost.

A visit (one prompt in one epoch) has an ordinal: epoch * prompts per epoch + index. Ordinals are
drawn in ascending order, so "drawn" is every ordinal below the cursor.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, Literal, get_args

from rlpost.data.base import PromptSource
from rlpost.errors import CheckpointError
from rlpost.types import Prompt

Open = Literal["drawn", "leased", "generated", "scored", "admitted"]
Closed = Literal["trained", "filtered", "evicted", "failed"]
State = Open | Closed

OPEN: tuple[Open, ...] = get_args(Open)
CLOSED: tuple[Closed, ...] = get_args(Closed)
ALLOWED: Mapping[str, tuple[State, ...]] = {
    "drawn": ("leased",),
    "leased": ("generated", "evicted", "failed"),
    "generated": ("scored", "evicted", "failed"),
    "scored": ("admitted", "filtered", "evicted", "failed"),
    "admitted": ("trained", "filtered", "evicted", "failed"),
}


class Ledger:
    """Draws prompts over the epochs and follows each until it is trained or out.

    `num_epochs` or `num_prompts` (visits) end the drawing, whichever comes first; with neither it
    never ends. Not thread-safe: it belongs to the driver.
    """

    def __init__(
        self,
        source: PromptSource,
        *,
        num_epochs: int | None,
        num_prompts: int | None,
    ) -> None:
        if len(source) == 0:
            raise ValueError(f"data set {source.name!r} holds no prompts")
        self._source = source
        limits = [num_prompts, None if num_epochs is None else num_epochs * len(source)]
        self._limit = min((limit for limit in limits if limit is not None), default=None)
        self._cursor = 0
        self._states: dict[str, State] = {}  # open visits only
        self._ordinals: dict[str, int] = {}
        self._redraw: deque[int] = deque()
        self._closed = bytearray()  # by ordinal: 0 open, else 1 + index in CLOSED
        self._counts: Counter[str] = Counter()

    @property
    def num_drawn(self) -> int:
        return self._cursor

    @property
    def counts(self) -> dict[str, int]:
        """How many visits ended in each way."""
        return {state: self._counts[state] for state in CLOSED}

    @property
    def epoch(self) -> int:
        """The epoch of the next new prompt."""
        return self._cursor // len(self._source)

    @property
    def exhausted(self) -> bool:
        """True when draw() will give nothing more."""
        return not self._redraw and self._limit is not None and self._cursor >= self._limit

    def in_flight(self) -> dict[str, State]:
        """Key -> state of every prompt that is drawn and not finished."""
        return dict(self._states)

    def state(self, key: str) -> State:
        """Raises ValueError for a key that is not in flight."""
        if key not in self._states:
            raise ValueError(f"prompt {key!r} is not in flight: never drawn, or finished already")
        return self._states[key]

    def draw(self) -> Prompt | None:
        """The next prompt, in state "drawn"; None at the end. In-flight ones of a resume first."""
        if self._redraw:
            return self._prompt_at(self._redraw.popleft())
        if self.exhausted:
            return None
        prompt = self._prompt_at(self._cursor)
        if prompt.key in self._states:
            raise ValueError(f"data set {self._source.name!r} holds prompt {prompt.key!r} twice")
        self._open(prompt.key, self._cursor)
        self._closed.append(0)
        self._cursor += 1
        return prompt

    def move(self, key: str, state: State) -> None:
        """Moves an in-flight prompt on. Raises ValueError on an illegal transition."""
        now = self.state(key)
        if state not in ALLOWED[now]:
            raise ValueError(
                f"prompt {key!r} can't go from {now!r} to {state!r}; "
                f"from {now!r} it goes to {', '.join(ALLOWED[now])}"
            )
        if state in OPEN:
            self._states[key] = state
            return
        del self._states[key]
        self._closed[self._ordinals.pop(key)] = 1 + CLOSED.index(state)
        self._counts[state] += 1

    def check(self) -> None:
        """Asserts drawn = trained + filtered + evicted + failed + in flight, by id."""
        open_now, at = set(), self._closed.find(0)
        while at >= 0:
            open_now.add(at)
            at = self._closed.find(0, at + 1)
        held = set(self._ordinals.values())
        strays = sorted(open_now ^ held)
        names = [self._prompt_at(ordinal).key for ordinal in strays[:3]]
        assert not strays, (
            f"{len(strays)} prompts are neither finished nor in flight, or both: {names}"
        )
        assert self._states.keys() == self._ordinals.keys(), (
            f"state and place disagree for {sorted(self._states.keys() ^ self._ordinals.keys())}"
        )
        for code, name in enumerate(CLOSED, start=1):
            by_id = self._closed.count(code)
            assert by_id == self._counts[name], f"{self._counts[name]} {name}, {by_id} by id"
        assert self._cursor == self._counts.total() + len(self._states), (
            f"{self._cursor} drawn, {self.counts}, {len(self._states)} in flight"
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. The outcome of each finished visit is kept as one hex digit."""
        return {
            "source": self._source.name,
            "size": len(self._source),
            "cursor": self._cursor,
            "last_drawn": self._prompt_at(self._cursor - 1).key if self._cursor else None,
            "in_flight": {key: self._ordinals[key] for key in self._states},
            "outcomes": self._closed.hex()[1::2],
            "counts": self.counts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state; its in-flight prompts are drawn again first.

        Raises CheckpointError when the data set is not the one that was saved.
        """
        self._require_same_data(state)
        self._cursor = int(state["cursor"])
        self._closed = bytearray(int(digit, 16) for digit in state["outcomes"])
        self._counts = Counter(state["counts"])
        self._states, self._ordinals = {}, {}
        for key, ordinal in sorted(state["in_flight"].items(), key=lambda item: item[1]):
            self._open(key, ordinal)
        self._redraw = deque(sorted(self._ordinals.values()))
        self.check()

    def _require_same_data(self, state: Mapping[str, Any]) -> None:
        for name, now in (("source", self._source.name), ("size", len(self._source))):
            if state[name] != now:
                raise CheckpointError(
                    f"the ledger was saved with data {name} {state[name]!r}, this run has {now!r}; "
                    "resume with the same data group"
                )
        places = {**state["in_flight"]}
        if state["cursor"]:
            places[state["last_drawn"]] = int(state["cursor"]) - 1
        for key, ordinal in places.items():
            now = self._prompt_at(ordinal).key
            if now != key:
                raise CheckpointError(
                    f"place {ordinal} held prompt {key!r} when the ledger was saved and holds "
                    f"{now!r} now; resume with the same data and seed"
                )

    def _open(self, key: str, ordinal: int) -> None:
        self._states[key] = "drawn"
        self._ordinals[key] = ordinal

    def _prompt_at(self, ordinal: int) -> Prompt:
        epoch, index = divmod(ordinal, len(self._source))
        return self._source.get(epoch, index)
