"""Trainer ranks that a module's tests start again and again, and the small model they load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import megatron_models
import pytest
from trainer_ranks import Ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, so that the last stage and a critic need a copy, and a vocabulary that needs
    padding."""
    return megatron_models.write(tmp_path_factory.mktemp("models"), "qwen3")


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()
