"""Modes, their settings, hints, routes and vocabularies."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from rlpost.distillation.context import TeacherContext
from rlpost.distillation.full import FullConfig
from rlpost.distillation.sampled import Sampled, SampledConfig
from rlpost.distillation.topk import TopK, TopKConfig
from rlpost.distillation.vocabulary import check_vocabularies
from rlpost.errors import ConfigError, DataError
from rlpost.types import Prompt

CONF = Path(__file__).parents[2] / "conf" / "distillation"
NAN = float("nan")


def settings(name, **changes):
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    del values["_target_"]
    return values | {"teacher_temperature": 1.0} | changes


def prompt(**changes):
    return Prompt(
        "p/1", 0, 0, **{"text": "1+1=", "answer": "2", "metadata": {"level": 3}} | changes
    )


def context(**changes):
    given = {"hint_template": None, "route_by": None, "teachers": ("one",), "max_length": 64}
    return TeacherContext(**given | changes)


def test_sampled_adds_the_clipped_gain_to_the_scaled_advantages():
    """A = policy_coef A + coef clip(tau - old); a token without teacher keeps what it had."""
    mode = Sampled(SampledConfig(**settings("sampled", coef=2.0, policy_coef=0.5, clip=1.0)))
    old = torch.tensor([-1.0, -1.0, -4.0, -1.0])
    teacher = torch.tensor([-0.5, -5.0, -1.0, NAN])
    found = mode.advantages(torch.tensor([1.0, 1.0, 0.0, 1.0]), old, teacher)
    assert found.tolist() == [0.5 + 2 * 0.5, 0.5 - 2.0, 2.0, 0.5]


@pytest.mark.parametrize(
    ("subset", "student", "teacher", "needs"),
    [
        ("student", 8, 0, ("old_logprobs",)),
        ("teacher", 0, 8, ()),
        ("union", 8, 8, ("old_logprobs",)),
    ],
)
def test_a_subset_says_who_chooses_ids_and_whether_the_teacher_waits(
    subset, student, teacher, needs
):
    mode = TopK(TopKConfig(**settings("topk", subset=subset)))
    assert (mode.asks_student, mode.asks_teacher, mode.teacher_needs) == (student, teacher, needs)
    assert ("student_ids" in mode.columns) == (student > 0)


@pytest.mark.parametrize(
    ("name", "config", "changes", "message"),
    [
        ("topk", TopKConfig, {"divergence": "jsd"}, "beta is null, but divergence: jsd needs it"),
        ("full", FullConfig, {"beta": 0.5}, "beta (0.5) has no effect with divergence: reverse_kl"),
        ("full", FullConfig, {"route_by": "level"}, "hold one teacher with full"),
        ("sampled", SampledConfig, {"context": "hint"}, "hint_template is null"),
        ("sampled", SampledConfig, {"hint_template": "{prompt}"}, "no effect with context: same"),
        (
            "sampled",
            SampledConfig,
            {"context": "hint", "hint_template": "{hint}{prompt}"},
            "names {hint}; known: {prompt}",
        ),
        (
            "sampled",
            SampledConfig,
            {"context": "hint", "hint_template": "{answer}"},
            "leaves {prompt} out",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(name, config, changes, message):
    with pytest.raises(ValueError) as error:
        config(**settings(name, **changes))
    assert message in str(error.value)


def test_a_hint_stands_in_the_teachers_prompt_alone():
    hinted = context(hint_template="{solution} {metadata[level]} {answer}={prompt}")
    given = prompt(completion="1+1=2")
    assert hinted.prompt_of(given).text == "1+1=2 3 2=1+1="
    chat = prompt(
        text=None,
        completion="x",
        messages=({"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}),
    )
    first, last = hinted.prompt_of(chat).messages
    assert first == {"role": "system", "content": "s"}
    assert last == {"role": "user", "content": "x 3 2=1+1="}
    assert context().prompt_of(given) is None


def test_a_hint_that_a_prompt_lacks_is_an_error_that_names_it():
    with pytest.raises(DataError, match=r"names \{solution\}, but prompt 'p/1' has none"):
        context(hint_template="{solution}{prompt}").prompt_of(prompt())
    with pytest.raises(DataError, match=r"names 'topic', which prompt 'p/1' lacks"):
        context(hint_template="{metadata[topic]}{prompt}").prompt_of(prompt())


def test_a_prompt_goes_to_the_teacher_that_its_metadata_names():
    routes = context(route_by="level", teachers=("3", "4"))
    assert routes.teacher_of(prompt()) == "3"
    with pytest.raises(DataError, match=r"no teacher for level = '5' .*teachers are 3, 4"):
        routes.teacher_of(prompt(metadata={"level": 5}))
    with pytest.raises(DataError, match="has no metadata field 'level'"):
        routes.teacher_of(prompt(metadata={}))
    assert context().teacher_of(prompt(metadata={})) == "one"


def folder(path, characters):
    from rlpost.models.characters import character_tokenizer, vocabulary

    path.mkdir()
    character_tokenizer(vocabulary(characters, 16), max_length=8).save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"vocab_size": 16}))
    return path


def test_vocabularies_are_compared_token_by_token(tmp_path):
    student, same, other = (
        folder(tmp_path / name, characters)
        for name, characters in (("student", "01+="), ("same", "01+="), ("other", "10+="))
    )
    check_vocabularies(student, {"teacher.x": same}, k=16)
    with pytest.raises(ConfigError, match=r"teacher.x: 2 tokens of .*other have other ids .*'0'"):
        check_vocabularies(student, {"teacher.x": other}, k=None)
    with pytest.raises(ConfigError, match=r"distillation.k \(17\) is more than the 16 tokens"):
        check_vocabularies(student, {"teacher.x": same}, k=17)
    (other / "config.json").write_text(json.dumps({"vocab_size": 20}))
    with pytest.raises(ConfigError, match=r"has 20 ids \(.*other\), the student's 16 \(.*student"):
        check_vocabularies(student, {"teacher.x": other}, k=None)
