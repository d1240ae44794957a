"""Classes that each break one point of a contract. Those of rewards first."""

import random
import sys
import time
from dataclasses import dataclass

from rlpost.algorithms.grpo import Grpo, GrpoConfig


@dataclass(frozen=True)
class EmptyConfig:
    pass


@dataclass(frozen=True)
class WithDefaultConfig:
    wanted: int = 3


@dataclass
class MutableConfig:
    pass


class NoConfig:
    def score(self, inputs):
        return 1.0


class Base:
    Config = EmptyConfig

    def __init__(self, config):
        pass


class NoMethod(Base):
    pass


class WithDefault(Base):
    Config = WithDefaultConfig


class Mutable(Base):
    Config = MutableConfig


class Raises(Base):
    def score(self, inputs):
        return 1.0 / len(inputs.response)


class Exits(Base):
    def score(self, inputs):
        sys.exit(3)


class Text(Base):
    def score(self, inputs):
        return "1.0"


class NotFinite(Base):
    def score(self, inputs):
        return float("nan")


class Awaited(Base):
    async def score(self, inputs):
        return 1.0


class Random(Base):
    def score(self, inputs):
        return random.random()


class Remembers(Base):
    def __init__(self, config):
        self.calls = 0

    def score(self, inputs):
        self.calls += 1
        return float(self.calls)


class Writes(Base):
    def score(self, inputs):
        inputs.prompt.metadata["seen"] = True
        return 1.0


class Slow(Base):
    def score(self, inputs):
        time.sleep(5)
        return 1.0


class Nested:
    class Inside(Base):
        def score(self, inputs):
            return 1.0


def local():
    class Local(Base):
        def score(self, inputs):
            return 1.0

    return Local


Local = local()


class TooFewScores(Base):
    gives_values = False

    def score_steps(self, inputs):
        return [1.0]


class MeanLoss(Grpo):
    """Takes the mean itself, so that padding counts and micro-batches do not add up."""

    Config = GrpoConfig

    def loss(self, inputs):
        return -(inputs.advantages_M * inputs.logprobs_M).mean(), {}


class Unweighted(Grpo):
    def loss(self, inputs):
        return (inputs.logprobs_M - inputs.old_logprobs_M).square().sum(), {}


class Detached(Grpo):
    def loss(self, inputs):
        return (inputs.weights_M * inputs.logprobs_M.detach()).sum(), {}


class OtherLeaf(Grpo):
    def loss(self, inputs):
        return (inputs.weights_M * inputs.entropy_M).sum(), {}


class NoScalar(Grpo):
    def loss(self, inputs):
        return inputs.weights_M * inputs.logprobs_M, {}


class PlainMetrics(Grpo):
    def loss(self, inputs):
        return (inputs.weights_M * inputs.logprobs_M).sum(), {"train/kl": 0.1}


class NanAdvantages(Grpo):
    def token_advantages(self, inputs):
        return inputs.outcome_S.repeat_interleave(inputs.lengths_S)


class WrongShape(Grpo):
    def outcome(self, inputs):
        return inputs.rewards_N[:1]


class Noisy(Grpo):
    def loss(self, inputs):
        return (inputs.weights_M * inputs.logprobs_M).sum() * random.random(), {}


class InPlace(Grpo):
    def loss(self, inputs):
        inputs.advantages_M.mul_(2)
        return (inputs.weights_M * inputs.logprobs_M).sum(), {}


class Incomplete(Base):
    def loss(self, inputs):
        return inputs.logprobs_M.sum(), {}
