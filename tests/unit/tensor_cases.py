"""Sequences of uneven length, as flat tensors, and loops over their tokens."""

import random

import torch

LENGTHS = [3, 1, 0, 4, 2]  # a sequence without loss tokens must disturb no one


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def noise(seed, low=-2.0, high=0.0):
    source = random.Random(seed)
    return [source.uniform(low, high) for _ in range(sum(LENGTHS))]


def spans(lengths=LENGTHS):
    start = 0
    for length in lengths:
        yield range(start, start + length)
        start += length


def assert_close(actual, expected):
    torch.testing.assert_close(
        actual.double(), double(expected), equal_nan=True, rtol=1e-9, atol=1e-9
    )
