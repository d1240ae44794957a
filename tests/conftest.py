"""Whole runs are shared by all the tests that look at them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shared_runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("runs"))
    try:
        yield made
    finally:
        made.end()
