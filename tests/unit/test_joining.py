"""Joining columns by sample id: what is missing, doubled or cut short is named, never filled."""

import numpy as np
import pytest

from rlpost.data.joining import join_blocks
from rlpost.types import SampleBlock

IDS = ("a", "b")


def block(names, **columns):
    """One token for each sample."""
    return SampleBlock(
        names, np.ones(len(names), np.int64), {k: np.array(v) for k, v in columns.items()}
    )


def test_rows_are_found_whatever_the_order_of_ranks_and_samples():
    made = [block(("b",), old=[2.0]), block(("c", "a"), old=[3.0, 1.0]), block(IDS, ids=[5, 6])]
    rows = join_blocks(made, IDS, ("ids", "old"))
    assert [(int(row["ids"][0]), float(row["old"][0])) for row in rows] == [(5, 1.0), (6, 2.0)]


def test_a_rank_that_delivers_nothing_is_an_error_that_names_column_and_samples():
    with pytest.raises(ValueError, match=r"column 'old' is missing for 1 of 2 samples, first: b"):
        join_blocks([block(("a",), old=[1.0])], IDS, ("old",))


def test_a_column_that_only_some_samples_have_is_an_error():
    """Not decided by what the first sample has."""
    made = [block(("a",), old=[1.0], ref=[1.0]), block(("b",), old=[2.0])]
    with pytest.raises(ValueError, match=r"column 'ref' is missing for 1 of 2 samples, first: b"):
        join_blocks(made, IDS, ("old", "ref"))


def test_a_column_delivered_twice_is_an_error():
    made = [block(IDS, old=[1.0, 2.0]), block(("b",), old=[9.0])]
    with pytest.raises(ValueError, match=r"column 'old' of sample 'b' was delivered twice"):
        join_blocks(made, IDS, ("old",))


def test_a_column_of_another_length_is_an_error():
    long = SampleBlock(("a",), np.array([2]), {"old": np.zeros(2)})
    with pytest.raises(ValueError, match=r"sample 'a' have unequal lengths: .*'ids': 1.*'old': 2"):
        join_blocks([block(("a",), ids=[5]), long], ("a",), ("ids", "old"))
