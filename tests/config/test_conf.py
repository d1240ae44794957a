"""Every YAML under conf/: keys and comments, and that every recipe is a valid run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlpost.checks import check
from rlpost.config import OPTIONAL_GROUPS, RoleConfig, RunConfig, Section, load
from rlpost.errors import ConfigError
from rlpost.overrides import CONF, compose_node
from rlpost.plan import RunPlan
from rlpost.validation import Validator
from rlpost.wording import MISSING

FILES = sorted(CONF.rglob("*.yaml"))
RECIPES = sorted(file.stem for file in (CONF / "recipe").glob("*.yaml"))
# Those of hydra are Hydra's; the others set keys of the whole run.
NO_SECTIONS = ("conf", "hydra", "launcher", "recipe", "sweep", "debug")
OPTIONS = [file for file in FILES if file.parent.name not in NO_SECTIONS]
ROLE_GROUPS = ("critic",)  # {model, trainer} in place of one class
NAMED_ROLES = {"teacher": "teachers"}  # group -> key that holds {name: {model, trainer}}
NAMED_PARTS = ("tracking",)  # {name: node with a class}, so that several options can be on
KEY = re.compile(r"^(?P<indent> *)(?P<key>[\w.@/]+):( |$)")


def named(file: Path) -> str:
    return file.relative_to(CONF).with_suffix("").as_posix()


def lines_without_comment(file: Path) -> Iterator[str]:
    """Keys, apart from `_target_` and `defaults`, whose line does not follow a comment."""
    before = ""
    for line in file.read_text().splitlines():
        match = KEY.match(line)
        exempt = match and match["key"] in ("_target_", "defaults")
        if match and not exempt and not before.lstrip().startswith("#"):
            yield line.strip()
        before = line


@pytest.mark.parametrize("file", FILES, ids=named)
def test_every_key_has_a_comment_above(file: Path) -> None:
    # A recipe or a sweep only sets keys that are explained elsewhere.
    if file.parent.name not in ("recipe", "sweep"):
        assert list(lines_without_comment(file)) == []


@pytest.mark.parametrize("file", OPTIONS, ids=named)
def test_keys_are_the_fields_of_the_config(file: Path) -> None:
    """Validation allows no key without a field and, as fields have no defaults, none missing."""
    group, option = file.parent.name, file.stem
    node = compose_node([f"{group}={option}", "run_name=test"])
    section = OmegaConf.to_container(node[NAMED_ROLES.get(group, group)], resolve=True)
    validator = Validator(["rlpost."])
    if group in NAMED_ROLES:
        for role in section.values():
            validator.validate(RoleConfig, role)
    elif group in ROLE_GROUPS:
        validator.validate(RoleConfig, section)
    elif group in NAMED_PARTS:
        assert set(section) == {option} - {"none"}
        for part in section.values():
            validator.validate(Holder, {"section": part})
    else:
        validator.validate(Holder, {"section": section})
    assert [line for line in validator.problems if MISSING not in line] == []


@dataclasses.dataclass(frozen=True)
class Holder:
    section: Section


def test_no_config_field_has_a_default() -> None:
    """Defaults live in YAML only."""
    for config in configs_of(load(compose_node([]))):
        for field in dataclasses.fields(config):
            assert field.default is dataclasses.MISSING, (config, field.name)
            assert field.default_factory is dataclasses.MISSING, (config, field.name)


def configs_of(value: Any) -> Iterator[Any]:
    """All Config classes that occur in a run."""
    value = value.config if isinstance(value, Section) else value
    if dataclasses.is_dataclass(value):
        yield type(value)
        for field in dataclasses.fields(value):
            yield from configs_of(getattr(value, field.name))
    for item in value.values() if isinstance(value, dict) else ():
        yield from configs_of(item)
    for item in value if isinstance(value, list) else ():
        yield from configs_of(item)


def test_shared_keys_and_groups_are_the_fields_of_the_run() -> None:
    names = {field.name for field in dataclasses.fields(RunConfig)}
    # A group that is off by default leaves no key.
    assert names - set(OPTIONAL_GROUPS) <= set(compose_node([])) <= names


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_and_passes_all_checks(recipe: str) -> None:
    check(load(compose_node([f"+recipe={recipe}"])))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_only_overrides_groups_that_exist(recipe: str) -> None:
    """Hydra drops a defaults entry whose keyword is misspelt without a word."""
    text = (CONF / "recipe" / f"{recipe}.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    node = OmegaConf.create(text)
    for entry in node.get("defaults", []):
        if entry == "_self_":
            continue
        ((key, option),) = entry.items()
        keyword, _, group = key.partition(" /")
        assert keyword == "override", key
        options = option if OmegaConf.is_list(option) else [option]
        folder = CONF / group.partition("@")[0]
        assert all(name is None or (folder / f"{name}.yaml").exists() for name in options), key


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ([], ["mlflow"]),
        (["tracking=none"], []),
        (["~tracking"], []),
        (["tracking=[mlflow,tensorboard]"], ["mlflow", "tensorboard"]),
        (["tracking=tensorboard"], ["tensorboard"]),
    ],
    ids=str,
)
def test_trackers_are_chosen_by_name_any_number_of_them(
    choice: list[str], names: list[str]
) -> None:
    assert list(load(compose_node(choice)).tracking) == names


ON_GPUS = ("+recipe=grpo_chain", "cluster=local_gpu", "engine=vllm_gpu", "trainer=megatron_gpu")
SHARES = ("engine.num_gpus_per_engine=0.5", "trainer.num_gpus_per_rank=0.5")


@pytest.mark.parametrize("more", [(), ("loop.colocate=true", *SHARES)])
def test_a_recipe_goes_to_gpus_by_its_groups_alone(more: tuple[str, ...]) -> None:
    check(load(compose_node([*ON_GPUS, *more])))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (SHARES, r"engine\.num_gpus_per_engine \(0\.5\) is a share of a GPU"),
        (SHARES, r"trainer\.num_gpus_per_rank \(0\.5\) is a share of a GPU"),
        (("loop.colocate=true",), "each engine has whole GPUs of its own"),
    ],
)
def test_gpus_are_shared_by_turns_or_not_at_all(more: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(load(compose_node([*ON_GPUS, *more])))


def test_interpolations_see_overrides() -> None:
    """A name derived from another key follows the override, not the default."""
    config = load(compose_node(["algorithm=rloo"]))
    assert config.run_name == "rloo"


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "0.00001"])
def test_numbers_are_numbers_however_they_are_written(text: str) -> None:
    config = load(compose_node([f"trainer.optimizer.lr={text}"]))
    assert config.trainer.config.optimizer.lr == 1e-5


def test_the_run_can_be_rebuilt_from_its_plain_values() -> None:
    config = load(compose_node(["run_name=again"]))
    assert load(OmegaConf.create(config.plain())) == config


def test_prompts_that_no_teacher_is_named_for_are_found_before_the_run() -> None:
    distilled = ["teacher=chain", "distillation=topk", "data.size=16"]
    assert RunPlan.of(load(compose_node(distilled))).passes[-1] == "teacher_logprobs"
    routed = load(compose_node([*distilled, "distillation.route_by=task"]))
    with pytest.raises(ConfigError, match=r"no teacher for task = 'chain_sum'.*; add teachers"):
        RunPlan.of(routed)
