"""The order of prompts."""

import random

import numpy as np

from rlpost.data.order import permutation, row_at

GOLDEN = [4, 5, 7, 0, 2, 1, 3, 6]


def test_an_epoch_visits_every_row_once():
    assert sorted(row_at(1, 0, index, 100) for index in range(100)) == list(range(100))


def test_epochs_and_seeds_differ_and_repeat():
    first = permutation(1, 0, 100).tolist()
    assert first != permutation(1, 1, 100).tolist()
    assert first != permutation(2, 0, 100).tolist()
    permutation.cache_clear()
    assert first == permutation(1, 0, 100).tolist()


def test_order_is_the_same_in_every_version_and_process():
    assert permutation(1, 0, 8).tolist() == GOLDEN


def test_global_generators_are_untouched():
    random.seed(5)
    np.random.seed(5)
    before = (random.getstate(), np.random.get_state()[1].tolist())
    permutation.cache_clear()
    permutation(9, 3, 1000)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
