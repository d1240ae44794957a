"""Fingerprints: additive over shards, sensitive to every bit and to order."""

from __future__ import annotations

import pytest
import torch

from rlpost.fingerprint import BLOCK, combine, fingerprint


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_flipped_bit_changes_it(dtype: torch.dtype) -> None:
    whole = tensor((40, 24), dtype)
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    for bit in range(8 * whole.element_size() - 1):
        changed = whole.clone()
        changed.view(integers)[17, 5] ^= 1 << bit
        assert fingerprint(changed) != fingerprint(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_swapped_elements_change_it(dtype: torch.dtype) -> None:
    whole = tensor((64,), dtype)
    seen = {fingerprint(whole)}
    for one in range(64):
        for two in range(one):
            if whole[one] == whole[two]:
                continue
            swapped = whole.clone()
            swapped[[one, two]] = whole[[two, one]]
            seen.add(fingerprint(swapped))
    pairs = sum(bool(whole[a] != whole[b]) for a in range(64) for b in range(a))
    assert len(seen) == pairs + 1


def test_negative_zero_is_not_zero() -> None:
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_shards_add_up_to_the_whole(dtype: torch.dtype) -> None:
    whole = tensor((30, 8), dtype)
    shards = [fingerprint(whole[low : low + 10], low * 8) for low in (0, 10, 20)]
    assert combine(shards) == fingerprint(whole)


def test_column_shards_add_up_to_the_whole() -> None:
    whole = tensor((30, 8), torch.bfloat16)
    shards = [fingerprint(whole[:, low : low + 4], low, row_stride=8) for low in (0, 4)]
    assert combine(shards) == fingerprint(whole)


def test_blocks_do_not_show() -> None:
    whole = tensor((2 * BLOCK + 7,), torch.float32)
    cut = BLOCK - 5
    assert combine([fingerprint(whole[:cut]), fingerprint(whole[cut:], cut)]) == fingerprint(whole)


def test_layout_in_memory_does_not_show() -> None:
    whole = tensor((12, 5), torch.float32)
    assert fingerprint(whole.t().contiguous().t()) == fingerprint(whole)
