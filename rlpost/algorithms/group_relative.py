"""What the algorithms share that compare a reward with the rewards of its own group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlpost import functional as F
from rlpost.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig


@dataclass(frozen=True)
class GroupRelativeConfig(PolicyGradientConfig):
    """`singleton`: the advantage of a reward that is alone in its group, 0 or the reward itself."""

    singleton: F.Singleton
    dynamic_sampling: bool

    def conflicts(self, run: Any) -> Iterator[str]:
        """`run` is the whole RunConfig."""
        yield from lone_rewards(run)
        if self.dynamic_sampling and run.group_size == 1:
            yield (
                "algorithm.dynamic_sampling: has no effect with group_size (1), as a single reward "
                "is not constant; set it to false or raise group_size"
            )


def lone_rewards(run: Any) -> Iterator[str]:
    """A reward alone in its group has no advantage; a teacher, or scores of steps, do without."""
    credit = None if run.prm is None else run.prm.config.credit
    taught = run.distillation is not None or (credit is not None and credit.mode != "aggregate")
    if run.group_size > 1 or taught or run.debug.only == "rollout":
        return
    if run.algorithm.config.singleton == "zero":
        yield (
            f"group_size (1): {run.algorithm.target.__name__} compares the rewards of a group, so "
            "with algorithm.singleton: zero every advantage is 0 and nothing is learned; raise "
            "group_size, set algorithm.singleton=raw, or choose algorithm=reinforce_pp"
        )


class GroupRelative(PolicyGradient):
    """A group whose rewards are all equal teaches nothing, so the loop may draw another."""

    config: GroupRelativeConfig

    @property
    def dynamic_sampling(self) -> bool:
        return self.config.dynamic_sampling
