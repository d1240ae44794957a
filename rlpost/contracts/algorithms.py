"""The contract of an algorithm, on the batch of made_up_batch.py.

Letters as in rlpost/algorithms/base.py: N = S sequences, M loss tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from rlpost.algorithms.base import LossInputs, ValueLossInputs
from rlpost.contracts.made_up_batch import LENGTHS, MISSING, REWARDS, Case, column, micro_batches
from rlpost.contracts.report import Finding, point, require
from rlpost.lazy import LazyModule
from rlpost.metrics import Metric
from rlpost.validation import Section

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

METHODS = ("outcome", "token_advantages", "aggregation_weights", "loss")
PASSES = ("old_logprobs", "ref_logprobs", "values")


def algorithm_findings(section: Section) -> Iterator[Finding]:
    case = Case(section)
    for name, check in (
        ("has the methods of an algorithm", lambda: _has_methods(section.target)),
        ("can be built from its Config", lambda: _built(case)),
        ("says its passes, minibatches and visits", lambda: says_its_plan(case.algorithm)),
        ("outcome() gives one number for each sample", lambda: _outcome(case)),
        ("token_advantages() are finite, 0 without an outcome", lambda: _advantages(case)),
        ("aggregation_weights() are finite and not negative", lambda: _weights(case)),
        ("loss() gives a finite scalar and metrics", lambda: _loss(case)),
        ("gradients reach the log-probs", lambda: _gradients(case)),
    ):
        finding = point(name, check)
        yield finding
        if finding.problem:
            return
    yield point("tokens without weight have no influence", lambda: _masks(case))
    yield point("losses of micro-batches add up", lambda: _adds_up(case))
    yield point("is deterministic", lambda: _deterministic(case))
    yield point("leaves its inputs as they are", lambda: _changes_nothing(case))
    if "values" in case.algorithm.passes:
        yield point("returns() and value_loss() train a critic", lambda: _critic(case))


def _has_methods(target: type) -> None:
    missing = [name for name in METHODS if not callable(getattr(target, name, None))]
    require(not missing, f"{', '.join(missing)} missing; see rlpost/algorithms/base.py")


def _built(case: Case) -> None:
    assert case.algorithm is not None


def says_its_plan(algorithm: Any) -> str:
    passes = algorithm.passes
    unknown = [name for name in passes if name not in PASSES]
    require(
        isinstance(passes, tuple) and not unknown,
        f"passes is {passes!r}; a tuple of {', '.join(PASSES)} is wanted",
    )
    for name in ("num_minibatches", "num_ppo_epochs"):
        value = getattr(algorithm, name)
        require(isinstance(value, int) and value > 0, f"{name} is {value!r}; an integer > 0")
    sampling = algorithm.dynamic_sampling
    require(isinstance(sampling, bool), f"dynamic_sampling is {sampling!r}; true or false")
    return f"passes: {', '.join(passes) or 'none'}"


def _outcome(case: Case) -> None:
    outcome = case.outcome()
    _has_shape(outcome, len(REWARDS), "[N]")
    known = [value for row, value in enumerate(outcome.tolist()) if row != MISSING]
    require(
        all(math.isfinite(value) for value in known),
        f"samples with a reward got {known}; only a missing reward (NaN) may give NaN",
    )


def _advantages(case: Case) -> None:
    advantages = case.algorithm.token_advantages(case.token_inputs())
    _has_shape(advantages, sum(LENGTHS), "[M]")
    require(torch.isfinite(advantages).all(), f"they are {advantages.tolist()}; replace NaN by 0")
    left = advantages[~case.trained()]
    require(
        not left.any(),
        f"tokens of the sample without a reward got {left.tolist()}; give them 0",
    )


def _weights(case: Case) -> None:
    weights = case.weights()
    require(
        torch.isfinite(weights).all() and (weights >= 0).all(),
        f"they are {weights.tolist()}",
    )
    require(weights.any(), "all are 0, so nothing would be trained")


def _loss(case: Case) -> None:
    result = case.algorithm.loss(case.loss_inputs())
    require(
        isinstance(result, tuple) and len(result) == 2,
        f"it gave {type(result).__name__}; return (loss, metrics)",
    )
    loss, metrics = result
    require(
        isinstance(loss, torch.Tensor) and loss.shape == (),
        f"the loss has {shape(loss)}; return sum(weights_M * per_token_loss_M), a scalar tensor",
    )
    require(torch.isfinite(loss), f"the loss is {loss.tolist()}")
    are_metrics(metrics)


def are_metrics(metrics: Any) -> None:
    require(isinstance(metrics, dict), f"metrics are {type(metrics).__name__}; a dict is wanted")
    for name, metric in metrics.items():
        require(
            isinstance(metric, Metric),
            f"metric {name!r} is {type(metric).__name__}; make it with rlpost.metrics.Metric, "
            "which says how it is merged over ranks",
        )
        require("/" in name, f"metric {name!r} has no area; call it train/{name}")
        require(math.isfinite(metric.result()), f"metric {name!r} is {metric.result()}")


def _gradients(case: Case) -> None:
    _, grad = case.gradient(case.loss_inputs())
    require(torch.isfinite(grad).all(), f"the gradient is {grad.tolist()}")
    require(grad.any(), "it is 0 for every token; the loss must depend on inputs.logprobs_M")


def _masks(case: Case) -> None:
    """Tokens of the sample that is not trained stand for padding: all their columns may change."""
    inputs = case.loss_inputs()
    quiet = inputs.weights_M == 0
    if not quiet.any():  # an algorithm that reads no rewards trains on every sample
        chosen = inputs.sequence_M == MISSING
        inputs = replace(inputs, weights_M=torch.where(chosen, 0.0, inputs.weights_M))
        quiet = chosen
    columns: dict[str, Any] = {
        name: torch.where(quiet, getattr(inputs, name) - 0.7, getattr(inputs, name))
        for name in ("logprobs_M", "old_logprobs_M", "rollout_logprobs_M", "entropy_M")
    }
    other = replace(inputs, **columns)
    (loss, grad), (loss_other, grad_other) = case.gradient(inputs), case.gradient(other)
    require(
        torch.isclose(loss, loss_other),
        f"the loss goes from {float(loss):g} to {float(loss_other):g} when they change; multiply "
        "each token's loss by inputs.weights_M, and take no mean over tokens",
    )
    require(
        not grad[quiet].any() and torch.allclose(grad[~quiet], grad_other[~quiet]),
        "they change the gradient; multiply each token's loss by inputs.weights_M",
    )


def _adds_up(case: Case) -> None:
    inputs = case.loss_inputs()
    whole, _ = case.gradient(inputs)
    parts = sum(float(case.gradient(part)[0]) for part in micro_batches(inputs))
    require(
        math.isclose(parts, float(whole), rel_tol=1e-6, abs_tol=1e-9),
        f"two micro-batches give {parts:g} together, the whole {float(whole):g}; the loss is a sum "
        "of weights_M * per_token_loss_M, never a mean",
    )


def _deterministic(case: Case) -> None:
    first, again = case.gradient(case.loss_inputs()), case.gradient(case.loss_inputs())
    require(
        all(torch.equal(one, other) for one, other in zip(first, again, strict=True)),
        f"the same batch gave loss {float(first[0]):g}, then {float(again[0]):g}; an algorithm "
        "holds no state and draws no random numbers",
    )


def _changes_nothing(case: Case) -> None:
    inputs = case.loss_inputs()
    tensors = {
        field.name: getattr(inputs, field.name)
        for field in fields(LossInputs)
        if isinstance(getattr(inputs, field.name), torch.Tensor)
    }
    before = {name: value.detach().clone() for name, value in tensors.items()}
    case.algorithm.loss(inputs)
    changed = [name for name, value in tensors.items() if not torch.equal(value, before[name])]
    require(not changed, f"loss() writes into {', '.join(changed)}; make new tensors")


def _critic(case: Case) -> None:
    algorithm, tokens = case.algorithm, case.token_inputs()
    returns = algorithm.returns(tokens)
    _has_shape(returns, sum(LENGTHS), "[M] returns")
    require(torch.isfinite(returns).all(), f"returns are {returns.tolist()}; 0 without an outcome")
    values = column(7, -0.5, 1).requires_grad_()
    old_values = tokens.values_M
    assert old_values is not None
    loss, metrics = algorithm.value_loss(
        ValueLossInputs(values, old_values, returns, case.weights())
    )
    are_metrics(metrics)
    require(loss.requires_grad, "the value loss has no gradient; compute it from inputs.values_M")
    loss.backward()
    require(values.grad is not None and values.grad.any(), "no gradient reaches inputs.values_M")


def _has_shape(value: Any, size: int, name: str) -> None:
    require(
        isinstance(value, torch.Tensor) and tuple(value.shape) == (size,),
        f"it gave {shape(value)}; a tensor of {size} numbers is wanted ({name})",
    )


def shape(value: Any) -> str:
    found = getattr(value, "shape", None)
    return f"type {type(value).__name__}" if found is None else f"shape {tuple(found)}"
