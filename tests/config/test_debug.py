"""The options of the group `debug`, with every recipe and loop; nothing is started."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from rlpost.checks import check
from rlpost.config import RunConfig, load
from rlpost.errors import ConfigError
from rlpost.overrides import CONF, compose_node
from rlpost.plan import RunPlan
from rlpost.plan.placement import placements
from rlpost.roles import engine_roles, trainer_roles

RECIPES = sorted(file.stem for file in (CONF / "recipe").glob("*.yaml"))
LOOPS = sorted(file.stem for file in (CONF / "loop").glob("*.yaml"))


def configured(*overrides: str) -> RunConfig:
    config = load(compose_node(overrides))
    check(config)
    return config


@pytest.mark.parametrize(("recipe", "loop"), list(itertools.product(RECIPES, LOOPS)))
def test_fast_makes_any_recipe_two_small_steps(recipe: str, loop: str) -> None:
    config = configured(f"+recipe={recipe}", f"loop={loop}", "debug=fast")
    assert config.num_steps == 2
    assert config.train_batch_size == 4
    assert config.group_size <= 2
    assert config.rollout.config.max_response_tokens <= 8
    assert config.debug.small_models
    trainers = [role.trainer.config for role in trainer_roles(config).values()]
    assert [trainer.world_size for trainer in trainers] == [1] * len(trainers)
    assert all(engine.config.num_engines == 1 for engine in engine_roles(config).values())
    if config.eval is not None:
        assert config.eval.config.num_prompts <= 4


def test_the_command_line_wins_over_fast_wherever_it_stands() -> None:
    own = ["num_steps=5", "train_batch_size=8", "group_size=4", "eval.num_prompts=9"]
    for overrides in (["debug=fast", *own], [*own, "debug=fast"]):
        config = configured("+recipe=grpo_chain", *overrides)
        assert (config.num_steps, config.train_batch_size, config.group_size) == (5, 8, 4)
        assert config.eval is not None
        assert config.eval.config.num_prompts == 9


def test_a_recipe_may_be_chosen_with_or_without_a_plus() -> None:
    plain, added = (configured(f"{sign}recipe=ppo_chain", "debug=fast") for sign in ("", "+"))
    assert dataclasses.replace(plain, debug=added.debug) == added


def test_limits_reach_roles_of_any_name_and_lower_only() -> None:
    ranks = "++teachers.default.trainer.data_parallel_size=4"
    limits = "debug.limits.rollout.max_response_tokens=64"
    config = configured("+recipe=opd_chain", "debug=fast", limits)
    assert config.rollout.config.max_response_tokens == 32  # the recipe's own, which is smaller
    wide = load(compose_node(["+recipe=opd_chain", ranks]))
    assert wide.teachers["default"].trainer.config.data_parallel_size == 4
    limited = configured("+recipe=opd_chain", "debug=fast")
    assert limited.teachers["default"].trainer.config.data_parallel_size == 1


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "sft_chain"])
def test_rollout_only_starts_no_trainer(recipe: str) -> None:
    config = configured(f"+recipe={recipe}", "debug=rollout_only")
    assert trainer_roles(config) == {}
    assert {"engine", "rollout"} <= set(placements(config)) <= {"engine", "prm", "rollout"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_train_only_starts_no_engine(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    config = configured(f"+recipe={recipe}", "debug=train_only", f"debug.samples_from={tmp_path}")
    assert engine_roles(config) == {}
    assert set(placements(config)) == {*trainer_roles(config), "rollout"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["debug=train_only"], r"samples_from \(null\) must name the folder of the run"),
        (
            ["debug=train_only", "debug.samples_from=nowhere"],
            r"debug\.samples_from: there is no folder 'nowhere'",
        ),
        (
            ["debug=train_only", f"debug.samples_from={CONF}"],
            r"debug\.samples_from: '.*conf' is no folder of a run: it holds no samples/",
        ),
        (["debug.only=train"], r"samples_from \(null\) must name the folder"),
        (["debug.samples_from=x"], "is read by debug=train_only alone"),
        (["debug=profile", "debug.profile.first_step=0"], "allowed: integer > 0"),
    ],
)
def test_wrong_debug_keys_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configured("+recipe=grpo_chain", *overrides)


def test_profiled_steps_may_not_have_been_before_a_resumed_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_000005"
    checkpoint.mkdir()
    resumed = ["+recipe=grpo_chain", "debug=profile", f"resume_from={checkpoint}"]
    (problem,) = RunPlan.of(configured(*resumed)).problems
    assert problem.startswith("resume_from: ") and "has no manifest.json" in problem
    (checkpoint / "state.json").write_text('{"step": 5}')
    (checkpoint / "manifest.json").write_text("{}")
    (problem,) = RunPlan.of(configured(*resumed)).problems
    assert problem == (
        "debug.profile: the first step it records is 2, but the run goes on after step 5 of "
        "resume_from; set debug.profile.first_step=6 or more"
    )
    assert RunPlan.of(configured(*resumed, "debug.profile.first_step=6")).problems == ()


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (["num_steps=50", "num_epochs=null"], "is 51 .*, but the run ends after 50"),
        (["num_steps=null", "num_epochs=1", "data.size=64"], "is 51 .*, but the run ends after 2"),
    ],
)
def test_profiled_steps_have_to_come(length: list[str], said: str) -> None:
    last = ["debug=profile", "debug.profile.first_step=50", "debug.profile.num_steps=2"]
    plan = RunPlan.of(configured("+recipe=grpo_chain", *last, *length))
    with pytest.raises(ConfigError, match=said):
        plan.check()


def test_options_go_together() -> None:
    config = configured("+recipe=grpo_prm_distill", "debug=[fast,profile]")
    assert config.debug.profile is not None
    assert config.debug.profile.last_step == config.num_steps
    half = configured("+recipe=grpo_prm_distill", "debug=[fast,rollout_only]")
    assert (half.debug.only, half.train_batch_size) == ("rollout", 4)


def test_without_an_option_nothing_is_limited() -> None:
    config = configured("+recipe=grpo_chain")
    assert config.debug.limits == {}
    assert not config.debug.small_models
    assert config.train_batch_size == 256
