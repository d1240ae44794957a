"""Runs with process rewards: what fits together, and what is refused before anything starts."""

import pytest

from rlpost.checks import check
from rlpost.config import load
from rlpost.errors import ConfigError
from rlpost.overrides import compose_node
from rlpost.plan import RunPlan
from rlpost.roles import engine_roles, served_prm

GRPO = ["+recipe=grpo_chain"]
TRAIN = ["+recipe=prm_train"]
BARE = ["algorithm=step_classification", "~weight_sync", "~eval"]


@pytest.mark.parametrize("option", ["verifier", "model", "judge"])
def test_a_recipe_takes_every_kind_of_process_reward(option):
    config = load(compose_node([*GRPO, f"prm={option}"]))
    check(config)
    assert list(engine_roles(config)) == ["engine", "prm"][: 1 + (option == "model")]


def test_a_judge_gets_engines_of_its_own():
    own = ["+model@prm.model=smollm2_135m", "+engine@prm.engine=vllm", "prm.engine.num_engines=2"]
    config = load(compose_node([*GRPO, "prm=judge", *own]))
    check(config)
    served = served_prm(config)
    assert served is not None and served.model.target.__name__ == "SmolLM2"
    assert engine_roles(config)["prm"].config.num_engines == 2


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([*GRPO, "prm=verifier", "prm.credit.mode=progress", "prm.credit.initial_value=0"],
         r"prm\.credit\.mode: progress .* ChainSteps judges each step"),
        ([*GRPO, "prm=model", "prm.limits.deadline_s=400"], r"prm\.limits\.deadline_s \(400\) x"),
        ([*GRPO, "prm=model", "prm.model.max_length=64"], r"prm\.model\.max_length \(64\)"),
        ([*GRPO, "prm=verifier", "prm.credit.gamma=0.9"], r"gamma \(0\.9\) has no effect"),
        ([*GRPO, "trainer=megatron_classifier"], "can't be trained by Grpo"),
        ([*BARE, "trainer=megatron_classifier"], "prm: null, but the scores of steps"),
        ([*TRAIN, "weight_sync=object_store"], "the policy stays as it is"),
        ([*TRAIN, "trainer=megatron"], "choose trainer=megatron_classifier"),
    ],
)  # fmt: skip
def test_what_has_no_effect_or_can_t_work_is_refused(overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        check(load(compose_node(overrides)))


def test_recorded_scores_train_no_policy_but_a_prm():
    config = load(compose_node(TRAIN))
    assert config.prm is not None and config.prm.config.credit is None
    assert RunPlan.of(config).passes == ()
    with pytest.raises(ConfigError, match=r"prm\.credit: has no effect"):
        check(load(compose_node([*TRAIN, "prm.credit={mode: step_normalized, coef: 1.0, "
                                 "gamma: null, initial_value: null, aggregate: null, "
                                 "weight: null}"])))  # fmt: skip
