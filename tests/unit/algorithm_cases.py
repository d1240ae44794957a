"""Algorithms built from their YAML, and one fixed ragged batch to feed them."""

import importlib
import json
import random
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from pydantic import TypeAdapter

from rlpost.algorithms.base import LossInputs, OutcomeInputs, TokenInputs
from rlpost.functional import sequence_numbers

CONF = Path(__file__).parents[2] / "conf" / "algorithm"


def target(path):
    module, _, attribute = yaml.safe_load(path.read_text())["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


# What trains a classifier of steps makes no advantages; it has tests of its own.
NAMES = sorted(p.stem for p in CONF.glob("*.yaml") if hasattr(target(p), "token_advantages"))
POLICY_GRADIENTS = [name for name in NAMES if name != "sft"]

LENGTHS = [3, 1, 4, 2, 5, 2]
REWARDS = [1.0, 0.0, 0.25, 1.0, 0.5, 3.0]
GROUPS = ["a", "b", "a", "b", "a", "c"]  # ragged, interleaved, and a group of one


def build(name, **overrides):
    cls = target(CONF / f"{name}.yaml")
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text()) | overrides
    del values["_target_"]
    adapter = TypeAdapter(cls.Config)
    return cls(adapter.validate_json(json.dumps(values), strict=True, extra="forbid"))


def noise(seed, low, high):
    source = random.Random(seed)
    values = [source.uniform(low, high) for _ in range(sum(LENGTHS))]
    return torch.tensor(values, dtype=torch.float64)


def outcome_inputs(rewards=REWARDS):
    return OutcomeInputs(torch.tensor(rewards, dtype=torch.float64), GROUPS, torch.tensor(LENGTHS))


def token_inputs(outcome, rows=None, reduce_sum=lambda tensor: tensor):
    """The rows' tokens; `ref` lies near `old`, which lies near the current log-probs."""
    rows = list(range(len(LENGTHS))) if rows is None else rows
    chosen = torch.isin(sequence_numbers(torch.tensor(LENGTHS)), torch.tensor(rows))
    old = noise(2, -2, -1)[chosen]
    lengths = torch.tensor([LENGTHS[row] for row in rows])
    return TokenInputs(
        outcome[rows],
        lengths,
        old,
        noise(4, -2, -1)[chosen],
        reduce_sum,
        values_M=noise(6, -0.5, 1)[chosen],
    )


def loss_inputs(algorithm, advantages):
    """The whole batch as one micro-batch of one rank."""
    lengths = torch.tensor(LENGTHS)
    weights = algorithm.aggregation_weights(lengths, sum(LENGTHS), len(LENGTHS))
    return LossInputs(
        logprobs_M=noise(1, -2, -1).requires_grad_(),
        entropy_M=noise(5, 0, 3).requires_grad_(),
        old_logprobs_M=noise(2, -2, -1),
        rollout_logprobs_M=noise(3, -2, -1),
        ref_logprobs_M=noise(4, -2, -1),
        advantages_M=advantages,
        weights_M=weights.double(),
        sequence_M=sequence_numbers(lengths),
        num_sequences=len(LENGTHS),
    )


def run(algorithm, rewards=REWARDS):
    """Advantages, inputs, loss (its gradients computed) and metrics of the fixed batch."""
    advantages = algorithm.token_advantages(
        token_inputs(algorithm.outcome(outcome_inputs(rewards)))
    )
    inputs = loss_inputs(algorithm, advantages)
    loss, metrics = algorithm.loss(inputs)
    loss.backward()
    return advantages, inputs, loss, metrics


def micro_batch(inputs, rows):
    """The rows of `inputs` as a micro-batch of their own; gradients reach the same leaves."""
    chosen = torch.isin(inputs.sequence_M, torch.tensor(rows))
    columns = {
        name: value[chosen]
        for name, value in vars(inputs).items()
        if isinstance(value, torch.Tensor) and name != "sequence_M"
    }
    sequence_M = sequence_numbers(torch.tensor([LENGTHS[row] for row in rows]).long())
    return replace(inputs, **columns, sequence_M=sequence_M, num_sequences=len(rows))
