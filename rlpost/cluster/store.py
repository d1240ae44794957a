"""The object store: `put` gives a reference, `fetch` gives the object back, in any process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlpost.lazy import LazyModule

if TYPE_CHECKING:
    import ray
else:
    ray = LazyModule("ray")


@dataclass(frozen=True)
class StoreRef:
    """Wraps an ObjectRef so that passing it to a worker moves the reference, not the data."""

    ref: ray.ObjectRef


def put(value: Any) -> StoreRef:
    return StoreRef(ray.put(value))


def fetch(ref: StoreRef, timeout_s: float = 60.0) -> Any:
    """Reads one object (numpy arrays come back read-only, without a copy on the same node)."""
    return ray.get(ref.ref, timeout=timeout_s)


def fetch_all(refs: Sequence[StoreRef], timeout_s: float = 60.0) -> list[Any]:
    return list(ray.get([ref.ref for ref in refs], timeout=timeout_s))
