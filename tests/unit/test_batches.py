"""Batches on the driver: views, drop reasons, metrics."""

import math
from dataclasses import replace

import pytest

from rlpost.loops import report
from rlpost.loops.batches import Batch, drop_reason, view_for
from rlpost.types import GroupHandle


def group(key: str, rewards=(1.0, 0.0), lengths=(5, 9), failure: str = "", version: int = 3):
    return GroupHandle(
        prompt_key=key,
        sample_ids=tuple(f"{key}#{row}" for row in range(len(rewards))),
        block=f"block {key}",
        rewards=tuple(rewards),
        accuracies=tuple(rewards),
        lengths=tuple(lengths),
        loss_tokens=tuple(length - 2 for length in lengths),
        finish_reasons=("stop",) * len(rewards),
        oldest_version=version,
        verdict_counts={"ok": len(rewards)},
        generate_s=1.0,
        reward_s=0.1,
        failure=failure,
    )


def test_each_part_of_the_reward_has_a_mean_over_what_is_known():
    parts = [{"exact": (1.0, 0.0), "short": (1.0, math.nan)}, {"exact": (1.0, 1.0)}]
    groups = [replace(group(f"p{row}"), part_rewards=values) for row, values in enumerate(parts)]
    metrics = report.rollout_metrics(batch_of(*groups))
    assert metrics["rollout/reward/exact/mean"] == 0.75
    assert metrics["rollout/reward/short/mean"] == 1.0


def batch_of(*groups, dropped=()):
    return Batch.of(0, groups, dropped, generate_s=1.0, reward_s=0.0)


def view(batch, ranks=2, minibatches=2, visits=1):
    return view_for(
        batch,
        data_parallel_size=ranks,
        num_minibatches=minibatches,
        num_visits=visits,
    )


def test_every_sample_is_taken_by_exactly_one_rank_of_one_minibatch():
    batch = batch_of(*(group(f"p{row}") for row in range(5)))
    taken = [name for shares in view(batch).minibatches for share in shares for name in share]
    assert sorted(taken) == sorted(view(batch).scalars.sample_ids)


def test_minibatches_hold_the_same_samples_for_any_number_of_ranks():
    batch = batch_of(*(group(f"p{row}", lengths=(5 + row, 9)) for row in range(6)))
    contents = [
        [
            sorted(name for share in shares for name in share)
            for shares in view(batch, n).minibatches
        ]
        for n in (1, 2, 3)
    ]
    assert contents[0] == contents[1] == contents[2]


def test_visits_repeat_the_minibatches_in_order():
    batch = batch_of(group("a"), group("b"))
    once, twice = view(batch), view(batch, visits=2)
    assert twice.minibatches == once.minibatches * 2


@pytest.mark.parametrize(
    ("rewards", "drop_constant", "reason"),
    [
        ((1.0, 1.0), True, "constant_reward"),
        ((1.0, 1.0), False, ""),
        ((1.0, 0.0), True, ""),
        ((1.0,), True, ""),  # a single rollout is not a constant group
        ((math.nan, math.nan), False, "no_reward"),
    ],
)
def test_a_group_is_dropped_only_for_a_stated_reason(rewards, drop_constant, reason):
    made = group("p", rewards=rewards, lengths=(5,) * len(rewards))
    assert drop_reason(made, scored=True, drop_constant=drop_constant) == reason


def test_a_failed_group_is_dropped_with_its_own_reason():
    assert drop_reason(
        group("p", failure="prompt_too_long"), scored=False, drop_constant=False
    ) == ("prompt_too_long")


def test_a_run_without_rewards_keeps_groups_without_rewards():
    made = group("p", rewards=(math.nan,), lengths=(5,))
    assert drop_reason(made, scored=False, drop_constant=True) == ""


def test_missing_rewards_do_not_enter_the_mean():
    metrics = report.rollout_metrics(batch_of(group("p", rewards=(1.0, math.nan))))
    assert metrics["rollout/reward/mean"] == 1.0
    assert metrics["rollout/reward/missing"] == 1.0


def test_dropped_groups_are_counted_by_reason_and_their_tokens_were_generated():
    batch = batch_of(group("a"), dropped=[(group("b"), "constant_reward")])
    assert report.rollout_metrics(batch)["rollout/dropped/constant_reward"] == 1.0
    assert report.generated_tokens(batch) == 2 * (3 + 7)


def test_staleness_counts_from_the_oldest_token():
    batch = batch_of(group("a", version=3), group("b", version=1))
    assert report.staleness_max(batch, trainer_version=4) == 3.0
