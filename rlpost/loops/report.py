"""Metrics of a step from what the driver knows. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rlpost.data.ledger import Ledger
from rlpost.loops.batches import Batch
from rlpost.types import GroupHandle


def rollout_metrics(batch: Batch) -> dict[str, float]:
    """Means over the samples that are trained; counts of what was dropped, by reason."""
    rewards = _flat(group.rewards for group in batch.groups)
    finish = [reason for group in batch.groups for reason in group.finish_reasons]
    metrics = {
        "rollout/reward/mean": _mean(rewards),
        "rollout/reward/std": _std(rewards),
        "rollout/reward/missing": float(sum(math.isnan(reward) for reward in rewards)),
        "rollout/accuracy/mean": _mean(_flat(group.accuracies for group in batch.groups)),
        "rollout/length/mean": _mean(_flat(group.loss_tokens for group in batch.groups)),
        "rollout/length/max": max(_flat(group.loss_tokens for group in batch.groups)),
        "rollout/truncated/ratio": _mean([float(reason == "length") for reason in finish]),
        "rollout/groups/trained": float(len(batch.groups)),
        "rollout/groups/dropped": float(len(batch.dropped)),
    }
    for reason, count in Counter(reason for _, reason in batch.dropped).items():
        metrics[f"rollout/dropped/{reason}"] = float(count)
    for status, count in verdicts(batch.groups).items():
        metrics[f"rollout/verdict/{status}"] = float(count)
    for part in sorted({part for group in batch.groups for part in group.part_rewards}):
        values = _flat(group.part_rewards.get(part, ()) for group in batch.groups)
        metrics[f"rollout/reward/{part}/mean"] = _mean(values)
    return metrics | step_metrics([steps for group in batch.groups for steps in group.step_rewards])


def step_metrics(steps: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of the samples' step scores; nothing without process rewards."""
    if not steps:
        return {}
    scores = _flat(steps)
    return {
        "prm/score/mean": _mean(scores),
        "prm/steps/mean": _mean([float(len(scores)) for scores in steps]),
        "prm/missing": float(sum(math.isnan(score) for score in scores)),
    }


def verdicts(groups: Sequence[GroupHandle]) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for group in groups:
        counts.update(group.verdict_counts)
    return counts


def ledger_metrics(ledger: Ledger) -> dict[str, float]:
    """Where all prompts drawn so far are."""
    counts = ledger.counts | {"drawn": ledger.num_drawn, "in_flight": len(ledger.in_flight())}
    return {f"data/ledger/{state}": float(count) for state, count in counts.items()}


def generated_tokens(batch: Batch) -> int:
    """Every sampled token, trained or dropped."""
    groups = [*batch.groups, *(group for group, _ in batch.dropped)]
    return sum(sum(group.loss_tokens) for group in groups)


def staleness_max(batch: Batch, trainer_version: int) -> float:
    """Trainer's version minus the oldest version among the tokens of the batch."""
    return float(trainer_version - min(group.oldest_version for group in batch.groups))


def _flat(columns: Iterable[Iterable[float]]) -> list[float]:
    return [float(value) for column in columns for value in column]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _std(values: Sequence[float]) -> float:
    centre = _mean(values)
    return math.sqrt(_mean([(value - centre) ** 2 for value in values]))
