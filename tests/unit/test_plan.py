"""Batch arithmetic and placement, on a toy run."""

from __future__ import annotations

import pytest
from toy_run import WITH_VALUES, critic, run_config, section

from rlpost.errors import ConfigError
from rlpost.plan import RunPlan
from rlpost.plan.arithmetic import Split


def test_batch_arithmetic() -> None:
    plan = RunPlan.of(run_config())
    assert plan.prompts_per_step == 16
    assert plan.samples_per_minibatch == 64


def test_steps_follow_from_epochs_and_count_whole_batches() -> None:
    plan = RunPlan.of(run_config())
    assert plan.num_steps == 12  # 200 prompts in batches of 16
    assert plan.steps_per_epoch == 6


def test_given_steps_are_taken() -> None:
    assert RunPlan.of(run_config(num_steps=7, num_epochs=None)).num_steps == 7


def test_less_data_than_one_batch_is_an_error() -> None:
    small = run_config(data=section(num_prompts=7))
    with pytest.raises(ConfigError, match=r"num_epochs \(2\) x 7 prompts .* batch of 16 prompts"):
        RunPlan.of(small)


def workers(plan: RunPlan) -> list[tuple[str, str]]:
    return [(bundle.device, bundle.name) for bundle in plan.bundles]


def test_every_rank_has_its_place() -> None:
    plan = RunPlan.of(run_config())
    assert workers(plan) == [
        ("GPU 0", "actor[0]"),
        ("GPU 1", "actor[1]"),
        ("GPU 2", "actor[2]"),
        ("GPU 3", "actor[3]"),
        ("CPU", "engine[0]"),
        ("CPU", "engine[1]"),
        ("CPU", "engine[2]"),
        ("CPU", "rollout[0]"),
    ]
    assert plan.problems == ()


def test_a_reference_runs_only_when_the_algorithm_asks_for_it() -> None:
    asking = section(passes=("old_logprobs", "ref_logprobs"))
    plan = RunPlan.of(run_config(algorithm=asking))
    assert {bundle.role for bundle in plan.bundles} == {"actor", "engine", "rollout"}
    assert list(plan.splits) == ["actor", "reference"]
    assert plan.order == (("old_logprobs: actor", "ref_logprobs: reference"), ("train: actor",))
    assert plan.problems == (
        "cluster.num_gpus (4) is less than the roles need (8: actor 4, reference 4)",
    )


def test_each_role_has_its_share_of_a_batch() -> None:
    asking = section(passes=WITH_VALUES)
    config = run_config(
        algorithm=asking, critic=critic(data_parallel_size=4, num_gpus_per_rank=0.0)
    )
    splits = RunPlan.of(config).splits
    assert splits["actor"] == Split(2, of_batch=64, of_optimizer_step=32)
    assert splits["critic"] == Split(4, of_batch=32, of_optimizer_step=16)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_staleness": 0}, "0 versions"),
        ({"max_staleness": 1}, "up to 1 version"),
        ({"update_weights_interval": 3}, "up to 2 versions, each of 3 steps"),
    ],
)
def test_the_loop_says_how_stale_a_batch_can_be(changes: dict[str, int], said: str) -> None:
    assert RunPlan.of(run_config(loop=section(**changes))).staleness == said


def test_deadlines_are_named_by_key() -> None:
    assert RunPlan.of(run_config()).deadlines_s["engine.start_deadline_s"] == 5.0
