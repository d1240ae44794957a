"""The order of prompts: a pure function of (seed, epoch, index). No global RNG is touched."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt


def stable_hash(*parts: object, bits: int) -> int:
    """A non-negative integer below 2**bits from the parts' text; equal in every process."""
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """Row numbers 0..size-1 in the order of `epoch` (read-only)."""
    generator = np.random.Generator(np.random.PCG64(stable_hash("order", seed, epoch, bits=63)))
    rows = generator.permutation(size)
    rows.flags.writeable = False
    return rows


def row_at(seed: int, epoch: int, index: int, size: int) -> int:
    """The row at `index` of `epoch`. Raises IndexError outside 0..size-1."""
    if not 0 <= index < size or epoch < 0:
        raise IndexError(f"epoch {epoch}, index {index} lies outside a data set of {size} prompts")
    return int(permutation(seed, epoch, size)[index])
