"""The contract of an algorithm that trains a classifier of steps, on a few made-up outputs.

M scored steps; outputs [M, 2], scores and weights [M].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlpost.contracts.algorithms import are_metrics, says_its_plan
from rlpost.contracts.report import Finding, point, require
from rlpost.lazy import LazyModule
from rlpost.validation import Section

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

OUTPUTS = ((0.3, -1.0), (2.0, 1.0), (-0.5, 0.7), (0.0, 0.1))
SCORES = (1.0, 0.0, 0.5, 1.0)
WEIGHTS = (0.25, 0.25, 0.5, 0.0)  # the last one is padding


def classifier_findings(section: Section) -> Iterator[Finding]:
    for name, check in (
        ("can be built from its Config", lambda: _built(section)),
        ("says its passes, minibatches and visits", lambda: says_its_plan(_built(section))),
        ("loss() gives a finite scalar and metrics", lambda: _loss(section)),
        ("gradients reach the outputs", lambda: _gradients(section)),
    ):
        finding = point(name, check)
        yield finding
        if finding.problem:
            return
    yield point("losses of micro-batches add up", lambda: _adds_up(section))
    yield point("is deterministic", lambda: _deterministic(section))


def _built(section: Section) -> Any:
    return section.target(section.config)


def _rows(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    columns = (OUTPUTS, SCORES, WEIGHTS)
    outputs, scores, weights = (torch.tensor(column[start:stop]) for column in columns)
    return outputs.requires_grad_(), scores, weights


def _loss(section: Section) -> None:
    loss, metrics = _built(section).loss(*_rows(0, len(SCORES)))
    require(loss.shape == () and torch.isfinite(loss), f"the loss is {loss.tolist()}")
    are_metrics(metrics)


def _gradients(section: Section) -> None:
    outputs, scores, weights = _rows(0, len(SCORES))
    loss, _ = _built(section).loss(outputs, scores, weights)
    require(loss.requires_grad, "the loss has no gradient; compute it from the outputs")
    loss.backward()
    grad = outputs.grad
    require(grad is not None and grad.any(), "it is 0 for all; the loss must depend on the outputs")
    assert grad is not None
    require(not grad[-1].any(), "a step of weight 0 has one; multiply each step's loss by weights")


def _value(section: Section, start: int, stop: int) -> float:
    loss, _ = _built(section).loss(*_rows(start, stop))
    return float(loss.detach())


def _adds_up(section: Section) -> None:
    whole, parts = _value(section, 0, 4), _value(section, 0, 2) + _value(section, 2, 4)
    require(
        math.isclose(parts, whole, rel_tol=1e-5),
        f"two micro-batches give {parts:g} together, the whole {whole:g}; the loss is a sum of "
        "weights * loss of a step, never a mean",
    )


def _deterministic(section: Section) -> None:
    first, again = _value(section, 0, 4), _value(section, 0, 4)
    require(first == again, f"the same steps gave loss {first:g}, then {again:g}")
