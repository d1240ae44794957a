"""Pure checks of a weight update: is the set complete, and do all ranks hold the same tensor?"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from rlpost.engines.base import WeightChunk
from rlpost.errors import WeightSyncError
from rlpost.fingerprint import combine

Shapes = Mapping[str, tuple[Sequence[int], bool]]  # name -> (shape, may be left out)


def check_complete(engine: str, shapes: Shapes, dtype: str, chunks: Sequence[WeightChunk]) -> None:
    """Raises WeightSyncError unless `chunks` bring every tensor of the model exactly once.

    vLLM itself accepts a partial set without a word.
    """
    specs = [spec for chunk in chunks for spec in chunk.specs]
    names = {spec.name for spec in specs}
    missing = [name for name, (_, optional) in shapes.items() if name not in names and not optional]
    unknown = [name for name in names if name not in shapes]
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} is unknown{_nearest(name, missing)}" for name in unknown]
    if len(names) < len(specs):
        problems.append("a name stands twice")
    for spec in specs:
        shape = shapes.get(spec.name, (spec.shape, True))[0]
        if tuple(shape) != tuple(spec.shape):
            problems.append(f"{spec.name} has shape {tuple(spec.shape)}, not {tuple(shape)}")
        if spec.dtype != dtype:
            problems.append(f"{spec.name} is {spec.dtype}, the engine's weights are {dtype}")
    if problems:
        raise WeightSyncError(
            f"{engine} refuses {len(specs)} tensors ({len(problems)} problems): "
            + "; ".join(problems[:5])
        )


def _nearest(name: str, candidates: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, candidates, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def whole_fingerprints(
    engine: str, names: Sequence[str], ranks: Sequence[Mapping[str, Sequence[int]]]
) -> dict[str, int]:
    """Adds up the ranks' (start, fingerprint) parts. Raises WeightSyncError if copies differ."""
    whole = {}
    for name in names:
        parts: dict[int, int] = {}
        for rank in ranks:
            start, value = rank[name]
            if parts.setdefault(start, value) != value:
                raise WeightSyncError(f"{engine}: ranks hold different copies of {name}")
        whole[name] = combine(parts.values())
    return whole
