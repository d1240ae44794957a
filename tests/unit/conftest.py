"""What the tests of the rollout worker share."""

import pytest
from fake_engine import FakeStore
from rollout_rig import Maker

from rlpost.cluster import store
from rlpost.rollout import worker


@pytest.fixture
def objects(monkeypatch):
    """The object store, in a dict."""
    fake = FakeStore()
    monkeypatch.setattr(store, "put", fake.put)
    monkeypatch.setattr(store, "fetch", fake.fetch)
    return fake


@pytest.fixture
def make_worker(monkeypatch, tmp_path, objects):
    def use(tokenizer):
        monkeypatch.setattr(worker, "load_tokenizer", lambda path: tokenizer)

    return Maker(tmp_path, use)
