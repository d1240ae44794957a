"""Rewards outside of rlpost, as a user writes them: found by PYTHONPATH and `trusted_prefixes`."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class OwnConfig:
    wanted: int


class Digits:
    """Share of `wanted` characters that are digits, at most 1; a random model meets it in part."""

    Config = OwnConfig

    def __init__(self, config):
        self._wanted = config.wanted

    def score(self, inputs):
        return min(1.0, sum(char.isdigit() for char in inputs.response) / self._wanted)


class Parity(Digits):
    """The same where the answer is even, else 0: about every second group is constant."""

    def score(self, inputs):
        return super().score(inputs) if int(inputs.prompt.answer) % 2 == 0 else 0.0


class Broken(Digits):
    def score(self, inputs):
        raise ValueError("the judge has no licence")


class Hanging(Digits):
    def score(self, inputs):
        time.sleep(3600)


class Slow(Digits):
    """Makes a step last a while, however fast the machine is."""

    def score(self, inputs):
        time.sleep(0.1)
        return super().score(inputs)


class StepDigits(Digits):
    """The same for each step of an answer."""

    gives_values = False

    def score_steps(self, inputs):
        return [sum(char.isdigit() for char in step) / self._wanted for step in inputs.steps]
