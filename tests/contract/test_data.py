"""What every prompt source keeps to, and that a held-out set holds no train prompt."""

import dataclasses
import json
import subprocess
import sys

import pytest

from rlpost.data.disjoint import shared_prompts
from rlpost.data.file import FileSource, FileSourceConfig
from rlpost.data.reasoning_gym import Exclude, ReasoningGymSource, ReasoningGymSourceConfig
from rlpost.data.worked_chain_sum import (
    WorkedChainSumSource,
    WorkedChainSumSourceConfig,
    worked_solution,
)
from rlpost.errors import ConfigError, DataError

DIGITS = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}
CHAIN_SUM = ReasoningGymSourceConfig(
    task="chain_sum",
    params=DIGITS,
    size=50,
    task_seed=1,
    exclude=[],
    prompt_template="{metadata[expression]}=",
    remove_spaces=True,
    chat=False,
    system_prompt=None,
)


def chain_sum(seed=1, **changes):
    return ReasoningGymSource(dataclasses.replace(CHAIN_SUM, **changes), seed=seed)


def worked(seed=1, unfinished_share=0.0, prompt_template="{prompt}"):
    config = WorkedChainSumSourceConfig(
        params=DIGITS,
        size=50,
        task_seed=1,
        exclude=[],
        unfinished_share=unfinished_share,
        prompt_template=prompt_template,
    )
    return WorkedChainSumSource(config, seed=seed)


def file_set(tmp_path, seed=1):
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps({"q": f"{i}=", "a": str(i)}) + "\n" for i in range(50)))
    config = FileSourceConfig(
        path=str(path),
        name="set",
        prompt_key="q",
        answer_key="a",
        completion_key=None,
        id_key=None,
        metadata_keys=[],
    )
    return FileSource(config, seed=seed)


@pytest.fixture(params=["chain_sum", "worked", "chat", "file"])
def make(request, tmp_path):
    makers = {
        "chain_sum": chain_sum,
        "worked": worked,
        "chat": lambda seed=1: chain_sum(seed, chat=True, system_prompt="Add up."),
        "file": lambda seed=1: file_set(tmp_path, seed),
    }
    return makers[request.param]


def ids(source, epoch):
    return [source.get(epoch, index).prompt_id for index in range(len(source))]


def test_an_epoch_holds_each_prompt_once_in_an_order_of_its_own(make):
    first, second = ids(make(), 0), ids(make(), 1)
    assert len(set(first)) == 50 and sorted(first) == sorted(second) and first != second


def test_get_is_pure_and_seed_changes_only_the_order(make):
    assert make().get(1, 7) == make().get(1, 7)
    assert ids(make(2), 0) != ids(make(1), 0)
    assert sorted(ids(make(2), 0)) == sorted(ids(make(1), 0))


def test_a_prompt_knows_its_place_and_has_one_form(make):
    prompt = make().get(3, 11)
    assert (prompt.epoch, prompt.index) == (3, 11)
    assert (prompt.text is None) != (prompt.messages is None)


def test_an_index_outside_the_set_is_an_error(make):
    with pytest.raises(IndexError):
        make().get(0, 50)


def test_neighbouring_task_seeds_are_unrelated_streams():
    rows = {chain_sum(task_seed=s).get(0, i).text for s in (1, 2) for i in range(50)}
    assert len(rows) > 90


def test_excluded_prompts_never_occur_in_the_held_out_set():
    train = chain_sum(size=3000)
    leaky = chain_sum(size=300, task_seed=2)
    held_out = chain_sum(size=300, task_seed=2, exclude=[Exclude(task_seed=1, size=3000)])
    assert shared_prompts(train, leaky)
    assert shared_prompts(train, held_out) == []
    assert len(held_out) == 300


def test_a_task_too_small_to_hold_anything_out_says_so():
    tiny = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    with pytest.raises(DataError, match="gave only 0 prompts"):
        chain_sum(params=tiny, task_seed=2, exclude=[Exclude(task_seed=1, size=500)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "chain_sums"}, "nearest: 'chain_sum'"),
        ({"params": {"min_term": 3}}, "no such parameter; nearest: 'min_terms'"),
        ({"params": {"min_terms": 0}}, "min_terms must be positive"),
        ({"params": {"seed": 3}}, "set data.task_seed instead"),
    ],
)
def test_a_wrong_task_or_parameter_is_a_config_error(changes, message):
    with pytest.raises(ConfigError, match=message):
        chain_sum(**changes)


def test_a_template_field_that_rows_lack_is_named():
    with pytest.raises(DataError, match=r"names 'formula'.*'expression'"):
        chain_sum(prompt_template="{metadata[formula]}").get(0, 0)
    with pytest.raises(ValueError, match=r"prompt_template .* names 'quest'"):
        dataclasses.replace(CHAIN_SUM, prompt_template="{quest}")


@pytest.mark.parametrize(
    ("expression", "solution"),
    [
        ("7 + 5 - 2", "7+5=12\n12-2=10\n10"),
        ("5 - -3 + 1", "5--3=8\n8+1=9\n9"),
        ("1 - 90 - 10", "1-90=-89\n-89-10=-99\n-99"),
        ("7", "7"),
    ],
)
def test_worked_solutions(expression, solution):
    assert worked_solution(expression) == solution


def test_unfinished_solutions_stop_one_step_early_for_about_the_share_given():
    source = worked(unfinished_share=0.5)
    prompts = [source.get(0, index) for index in range(len(source))]
    cut = [p for p in prompts if p.completion.splitlines()[-1] != p.answer]
    assert 10 < len(cut) < 40
    for prompt in cut:
        whole = worked_solution(prompt.metadata["entry"]["metadata"]["expression"]).splitlines()
        *steps, total = prompt.completion.splitlines()
        assert steps == whole[:-2]
        assert total == steps[-1].split("=")[1]


def test_worked_prompts_are_the_chain_sum_prompts_and_end_in_the_answer():
    for index in range(50):
        prompt = worked().get(0, index)
        assert prompt.text == chain_sum().get(0, index).text
        assert prompt.completion.splitlines()[-1] == prompt.answer


def test_sources_import_no_heavy_library():
    code = (
        "import sys, rlpost.data.file, rlpost.data.reasoning_gym, rlpost.data.worked_chain_sum;"
        "print([m for m in ('torch', 'ray', 'reasoning_gym', 'pyarrow', 'transformers')"
        " if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_worked_prompt_can_show_the_finished_solution_as_a_hint():
    source = worked(unfinished_share=1.0, prompt_template="{solution}={prompt}")
    plain = worked().get(0, 0)
    prompt = source.get(0, 0)
    assert prompt.text == f"{plain.completion}={plain.text}"
    assert prompt.completion != plain.completion
    with pytest.raises(ValueError, match=r"names \{hint\}; known: \{prompt\}"):
        worked(prompt_template="{hint}{prompt}")
