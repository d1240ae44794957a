import random

import pytest

from rlpost.data.balance import balanced_split, budget_split


def random_lengths(seed: int, count: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randint(1, 200) for _ in range(count)]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_every_sample_goes_to_exactly_one_part(num_parts):
    parts = balanced_split(random_lengths(1, 50), num_parts)
    assert sorted(index for part in parts for index in part) == list(range(50))
    assert len(parts) == num_parts


def test_parts_hold_nearly_equal_tokens():
    lengths = random_lengths(2, 64)
    loads = [sum(lengths[index] for index in part) for part in balanced_split(lengths, 4)]
    assert max(loads) - min(loads) <= max(lengths) // 4


def test_the_split_is_a_function_of_its_arguments():
    assert balanced_split([5, 3, 3, 1], 2) == [[0, 3], [1, 2]]
    assert balanced_split([4, 4, 4, 4], 2) == [[0, 2], [1, 3]]


def test_fewer_samples_than_parts_leaves_empty_parts():
    assert balanced_split([7], 3) == [[0], [], []]


@pytest.mark.parametrize("budget", [200, 333, 5000])
def test_micro_batches_stay_within_the_token_budget(budget):
    lengths = random_lengths(3, 40)
    parts = budget_split(lengths, budget)
    assert sorted(index for part in parts for index in part) == list(range(40))
    assert all(sum(lengths[index] for index in part) <= budget for part in parts)
    assert len(parts) <= 2 * (sum(lengths) // budget + 1)


def test_a_sample_longer_than_the_budget_stands_alone():
    assert budget_split([10, 99, 10], 20) == [[1], [0, 2]]


def test_no_samples_give_no_micro_batches():
    assert budget_split([], 10) == []


def test_zero_parts_and_zero_budget_are_refused():
    with pytest.raises(ValueError, match="num_parts"):
        balanced_split([1], 0)
    with pytest.raises(ValueError, match="budget"):
        budget_split([1], 0)
