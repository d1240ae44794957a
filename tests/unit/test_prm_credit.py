"""Credit of steps, against plain loops over the formulas of the papers."""

import math
from statistics import fmean, pstdev

import pytest

from rlpost.loops.batches import scalars_of
from rlpost.prm.credit import (
    CreditConfig,
    aggregated,
    combined_reward,
    progress,
    return_to_go,
    step_advantages,
    step_normalized,
)
from rlpost.types import GroupHandle

NAN = math.nan
# Two ragged groups whose samples are interleaved; the third sample of "a" has one step more.
IDS = ("a", "b", "a", "a", "b")
SCORES = (
    (1.0, 0.0, NAN),
    (0.5, NAN),
    (0.0, 0.0, 1.0, 0.25),
    (NAN, 1.0, 0.5),
    (0.5,),
)


def config(mode, **keys):
    fields = dict.fromkeys(("coef", "gamma", "initial_value", "aggregate", "weight"))
    return CreditConfig(mode=mode, **(fields | keys))


def plainly_normalized(value, bucket):
    if math.isnan(value) or len(bucket) == 1:
        return value
    if pstdev(bucket) == 0:
        return 0.0
    return (value - fmean(bucket)) / (pstdev(bucket) + 1e-6)


def approx(rows):
    return [pytest.approx(row, nan_ok=True, abs=1e-12) for row in rows]


def test_step_normalized_compares_the_same_step_within_the_group():
    wanted = []
    for scores, group in zip(SCORES, IDS, strict=True):
        row = []
        for step, score in enumerate(scores):
            bucket = [
                other[step]
                for other, theirs in zip(SCORES, IDS, strict=True)
                if theirs == group and step < len(other) and not math.isnan(other[step])
            ]
            row.append(plainly_normalized(score, bucket))
        wanted.append(tuple(row))
    assert step_normalized(SCORES, IDS) == approx(wanted)


def test_a_constant_bucket_gives_zero_and_a_bucket_of_one_its_raw_score():
    made = step_normalized(SCORES, IDS)
    assert made[1][0] == made[4][0] == 0.0
    assert made[2][3] == 0.25


def test_return_to_go_is_normalised_over_all_steps_of_the_group():
    gamma = 0.9
    returns = [
        [
            NAN
            if math.isnan(scores[s])
            else sum(
                gamma ** (later - s) * scores[later]
                for later in range(s, len(scores))
                if not math.isnan(scores[later])
            )
            for s in range(len(scores))
        ]
        for scores in SCORES
    ]
    wanted = []
    for row, group in zip(returns, IDS, strict=True):
        bucket = [
            value
            for other, theirs in zip(returns, IDS, strict=True)
            if theirs == group
            for value in other
            if not math.isnan(value)
        ]
        wanted.append(tuple(plainly_normalized(value, bucket) for value in row))
    assert return_to_go(SCORES, IDS, gamma=gamma) == approx(wanted)


def test_progress_is_the_difference_of_values_and_missing_next_to_a_missing_one():
    made = progress((0.75, 0.5, NAN, 1.0, 0.25), initial_value=0.5)
    assert made == pytest.approx((0.25, -0.25, NAN, NAN, -0.75), nan_ok=True)


@pytest.mark.parametrize("mode", ["step_normalized", "return_to_go"])
def test_a_missing_score_moves_no_other_step(mode):
    """Zero in its place would."""
    keys = {"coef": 1.0, "gamma": 1.0 if mode == "return_to_go" else None}
    without = step_advantages(config(mode, **keys), [(1.0,), (0.5,), (0.0,)], "aaa")
    beside = step_advantages(config(mode, **keys), [(1.0,), (0.5,), (0.0,), (NAN,)], "aaaa")
    assert beside[:3] == without and math.isnan(beside[3][0])
    zero = step_advantages(config(mode, **keys), [(1.0,), (0.5,), (0.0,), (0.0,)], "aaaa")
    assert zero[:3] != without


@pytest.mark.parametrize("mode", ["step_normalized", "return_to_go", "progress"])
def test_the_coefficient_weighs_every_mode(mode):
    keys = {
        "gamma": 0.5 if mode == "return_to_go" else None,
        "initial_value": 0.5 if mode == "progress" else None,
    }
    once = step_advantages(config(mode, coef=1.0, **keys), SCORES, IDS)
    thrice = step_advantages(config(mode, coef=3.0, **keys), SCORES, IDS)
    assert list(thrice) == approx([tuple(3 * value for value in row) for row in once])


@pytest.mark.parametrize(
    ("rule", "scores", "value"),
    [
        ("min", (0.5, NAN, 0.25), 0.25),
        ("product", (0.5, NAN, 0.25), 0.125),
        ("mean", (0.5, NAN, 0.25), 0.375),
        ("last", (0.5, NAN, 0.25), 0.25),
        ("last", (0.5, NAN), NAN),
        ("min", (NAN, NAN), NAN),
        ("product", (), NAN),
    ],
)
def test_steps_become_one_number(rule, scores, value):
    assert aggregated(scores, rule) == pytest.approx(value, nan_ok=True)


def test_the_aggregate_is_a_share_of_the_reward_or_all_of_it():
    half = config("aggregate", aggregate="min", weight=0.5)
    assert combined_reward(half, 1.0, (0.5, 0.25)) == 0.625
    assert math.isnan(combined_reward(half, 1.0, (NAN,)))
    whole = config("aggregate", aggregate="min", weight=1.0)
    assert combined_reward(whole, NAN, (0.5, 0.25)) == 0.25
    per_step = config("step_normalized", coef=1.0)
    assert combined_reward(per_step, 1.0, (0.0,)) == 1.0


@pytest.mark.parametrize(
    ("mode", "keys", "problem"),
    [
        ("return_to_go", {"coef": 1.0}, "gamma is null but mode: return_to_go"),
        ("step_normalized", {"coef": 1.0, "gamma": 0.9}, r"gamma \(0.9\) has no effect"),
        ("aggregate", {"coef": 1.0, "aggregate": "min", "weight": 1.0}, r"coef \(1.0\) has no"),
        ("progress", {"coef": 1.0}, "initial_value is null"),
    ],
)
def test_a_key_without_effect_is_refused(mode, keys, problem):
    with pytest.raises(ValueError, match=problem):
        config(mode, **keys)


def test_scalars_carry_advantages_made_from_whole_groups():
    def handle(key, steps):
        size = len(steps)
        return GroupHandle(
            prompt_key=key,
            sample_ids=tuple(f"{key}#{row}" for row in range(size)),
            block=None,
            rewards=(1.0,) * size,
            accuracies=(1.0,) * size,
            lengths=(4,) * size,
            loss_tokens=(2,) * size,
            finish_reasons=("stop",) * size,
            oldest_version=0,
            verdict_counts={},
            generate_s=0.0,
            reward_s=0.0,
            step_rewards=tuple(steps),
        )

    groups = [handle("a", [(1.0, 0.0), (0.0,)]), handle("b", [(1.0,)])]
    scalars = scalars_of(groups, credit=config("step_normalized", coef=2.0))
    assert scalars.step_rewards == ((1.0, 0.0), (0.0,), (1.0,))
    rounded = [tuple(round(value, 4) for value in row) for row in scalars.step_advantages]
    assert rounded == [(2.0, 0.0), (-2.0,), (2.0,)]
    assert scalars_of(groups).step_advantages == ()
