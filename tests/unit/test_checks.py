"""Rules across sections: each contradiction is told with its way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from toy_run import WITH_VALUES, critic, run_config, section

from rlpost.checks import check
from rlpost.config import RoleConfig, RunConfig
from rlpost.errors import ConfigError


def problems(config: RunConfig) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check(config)
    return error.value.problems


def test_a_consistent_run_passes() -> None:
    check(run_config())


NO_ENGINE = {"engine": None, "weight_sync": None, "eval": None}
SUPERVISED = {**NO_ENGINE, "rollout": section(samples=False), "algorithm": section(passes=())}
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"train_batch_size": 96, "group_size": 10, "algorithm": section(num_minibatches=1)},
        "train_batch_size (96) must be a multiple of group_size (10); try 90 or 100",
    ),
    (
        {"algorithm": section(num_minibatches=3), "trainer": section(data_parallel_size=1)},
        "algorithm.num_minibatches (3) must divide the 16 prompts of a batch "
        "(train_batch_size / group_size); try 1 or 2 or 4 or 8 or 16",
    ),
    (
        {"trainer": section(data_parallel_size=3)},
        "the 64 samples of an optimizer step (train_batch_size / algorithm.num_minibatches) must "
        "be a multiple of the trainer's 3 data-parallel ranks; try train_batch_size=96 or 144, "
        "or another number of ranks",
    ),
    (
        {"rollout": section(max_response_tokens=21)},
        "rollout.max_prompt_tokens (10) + rollout.max_response_tokens (21) are more than "
        "model.max_length (30); lower one of them or raise model.max_length",
    ),
    ({"reward": None}, "reward: null, but what Toy samples has to be scored; choose an option"),
    (
        {"rollout": section(samples=False), "algorithm": section(passes=(), num_minibatches=1)},
        "engine: has no effect, as Toy asks no engine; switch it off (~engine)",
    ),
    (
        {"rollout": section(samples=False), **NO_ENGINE},
        "algorithm: Toy compares with the policy that sampled, but Toy samples nothing; choose "
        "algorithm=sft or another rollout",
    ),
    ({**NO_ENGINE}, "engine: null, but Toy samples from engines; choose an option"),
    (
        {"weight_sync": None},
        "weight_sync: null, but engines would keep their first weights; choose an option",
    ),
    (
        {**SUPERVISED, "weight_sync": section()},
        "weight_sync: has no effect without engines; switch it off (~weight_sync)",
    ),
    (
        {**SUPERVISED, "eval": section()},
        "eval: needs engines to answer its prompts; switch it off (~eval)",
    ),
    ({"loop": section(said=("loop.colocate: no",))}, "loop.colocate: no"),
]


@pytest.mark.parametrize(
    ("changes", "line"), CONTRADICTIONS, ids=[x[:30] for _, x in CONTRADICTIONS]
)
def test_a_contradiction_is_explained(changes: dict[str, Any], line: str) -> None:
    assert problems(run_config(**changes)) == [line]


def test_a_missing_model_folder_is_named() -> None:
    assert problems(run_config(model=section(path="./nowhere")))[0].startswith(
        "model.path: there is no folder './nowhere'"
    )


def test_all_contradictions_are_reported_at_once() -> None:
    config = replace(run_config(), train_batch_size=100, resume_from="./nowhere")
    assert len(problems(config)) >= 2


@pytest.mark.parametrize("steps", [(None, None), (3, 1)])
def test_exactly_one_of_steps_and_epochs(steps: tuple[int | None, int | None]) -> None:
    with pytest.raises(ValueError, match="exactly one of num_steps"):
        run_config(num_steps=steps[0], num_epochs=steps[1])


def test_values_and_a_critic_go_together() -> None:
    asking = section(passes=WITH_VALUES)
    check(run_config(algorithm=asking, critic=critic()))
    assert problems(run_config(algorithm=asking)) == [
        "critic: null, but Toy needs values; choose an option (critic=megatron)"
    ]
    assert problems(run_config(critic=critic())) == [
        "critic: has no effect, as Toy reads no values; switch it off (~critic) or choose "
        "algorithm=ppo"
    ]


def test_a_critic_has_ranks_that_compute_values_and_share_evenly() -> None:
    asking = section(passes=WITH_VALUES)
    found = problems(run_config(algorithm=asking, critic=RoleConfig(section(), section())))
    assert "choose trainer@critic.trainer=megatron_critic" in found[0]
    (found,) = problems(run_config(algorithm=asking, critic=critic(data_parallel_size=3)))
    assert "must be a multiple of the critic's 3 data-parallel ranks" in found


def test_critic_only_steps_are_whole_intervals_of_updates() -> None:
    algorithm = section(passes=WITH_VALUES, num_critic_only_steps=5)
    loop = section(update_weights_interval=2)
    (found,) = problems(run_config(algorithm=algorithm, critic=critic(), loop=loop))
    assert found.endswith("multiple of loop.update_weights_interval (2); try 4 or 6")
