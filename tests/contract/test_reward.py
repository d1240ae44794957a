"""What every reward keeps to: a finite number for any response, the right one for known cases."""

import math
import subprocess
import sys

import pytest

from rlpost.data.reasoning_gym import ReasoningGymSource, ReasoningGymSourceConfig
from rlpost.errors import DataError
from rlpost.rewards.base import RewardInputs
from rlpost.rewards.exact_match import ExactMatch, ExactMatchConfig
from rlpost.rewards.format import Format, FormatConfig
from rlpost.rewards.math_verify import MathVerifyReward, MathVerifyRewardConfig
from rlpost.rewards.overlong import OverlongPenalty, OverlongPenaltyConfig
from rlpost.rewards.reasoning_gym import ReasoningGymReward, ReasoningGymRewardConfig
from rlpost.types import Prompt

LAST_LINE = r"(?m)^(.*\S)\s*\Z"
THOUGHT = r"<think>.*</think>\s*\S.*"
REWARDS = {
    "reasoning_gym": ReasoningGymReward(ReasoningGymRewardConfig(answer_pattern=LAST_LINE)),
    "math_verify": MathVerifyReward(MathVerifyRewardConfig(float_rounding=6, numeric_precision=15)),
    "exact_match": ExactMatch(ExactMatchConfig(answer_pattern=LAST_LINE, ignore_case=False)),
    "format": Format(FormatConfig(pattern=THOUGHT)),
    "overlong": OverlongPenalty(OverlongPenaltyConfig(max_response_tokens=20, buffer_tokens=10)),
}


def prompt():
    config = ReasoningGymSourceConfig(
        task="chain_sum",
        params={"min_terms": 3, "max_terms": 3, "min_digits": 2, "max_digits": 2},
        size=1,
        task_seed=1,
        exclude=[],
        prompt_template="{question}",
        remove_spaces=False,
        chat=False,
        system_prompt=None,
    )
    return ReasoningGymSource(config, seed=1).get(0, 0)


def score(name, response, *, asked=None, num_tokens=5):
    return REWARDS[name].score(RewardInputs(asked or prompt(), response, "stop", num_tokens))


def asking(answer):
    return Prompt("file/1", epoch=0, index=0, text="?", answer=answer)


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize(
    "response", ["", "\n\n", "12", "7+5=", "((((", r"\boxed{", "²", "nan", "1e999999", "\x00é" * 50]
)
def test_any_response_gets_a_finite_number(name, response):
    assert math.isfinite(score(name, response))


@pytest.mark.parametrize("name", ["reasoning_gym", "math_verify", "exact_match"])
def test_the_right_answer_on_the_last_line_scores_one_and_a_wrong_one_less(name):
    answer = prompt().answer
    assert score(name, f"working out\n{answer}\n") == 1.0
    assert score(name, f"{answer}\n{int(answer) + 1}") < 1.0


def test_the_task_s_own_scorer_decides():
    assert score("reasoning_gym", f"+{prompt().answer}.0") == 1.0
    assert score("exact_match", f"+{prompt().answer}.0") == 0.0


def test_reasoning_gym_reward_needs_a_reasoning_gym_prompt():
    with pytest.raises(DataError, match=r"file/1.*use data=reasoning_gym"):
        score("reasoning_gym", "1", asked=asking("1"))


@pytest.mark.parametrize(
    ("answer", "response", "value"),
    [
        ("1/2", r"so \boxed{0.5}", 1.0),
        (r"\frac{1}{2}", "the answer is $\\frac{2}{4}$", 1.0),
        ("x+1", r"\boxed{1+x}", 1.0),
        ("1/2", r"\boxed{0.25}", 0.0),
    ],
)
def test_math_verify_compares_as_mathematics(answer, response, value):
    assert score("math_verify", response, asked=asking(answer)) == value


def test_a_prompt_without_a_usable_answer_is_an_error_not_a_zero():
    for name in ("math_verify", "exact_match"):
        with pytest.raises(DataError, match="file/1"):
            score(name, "1", asked=asking(""))


def test_an_answer_whose_optional_group_is_absent_is_no_answer():
    reward = ExactMatch(ExactMatchConfig(answer_pattern=r"answer:(\d+)?", ignore_case=False))
    assert reward.score(RewardInputs(asking("7"), "answer:7", "stop", 5)) == 1.0
    assert reward.score(RewardInputs(asking("7"), "answer:", "stop", 5)) == 0.0


def test_format_wants_the_whole_response():
    assert score("format", "<think>7+5\n=12</think>\n12") == 1.0
    assert score("format", "well, <think>12</think> 12") == 0.0


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (10, 0.0), (15, -0.5), (20, -1.0), (99, -1.0)]
)
def test_overlong_penalty_falls_in_a_line(num_tokens, penalty):
    assert score("overlong", "x", num_tokens=num_tokens) == penalty


def test_bad_options_name_key_and_value():
    with pytest.raises(ValueError, match=r"answer_pattern \('\('\) is not a regular expression"):
        ReasoningGymRewardConfig(answer_pattern="(")
    with pytest.raises(ValueError, match="has 2 groups"):
        ExactMatchConfig(answer_pattern="(a)(b)", ignore_case=False)
    with pytest.raises(ValueError, match=r"buffer_tokens \(9\) must not exceed"):
        OverlongPenaltyConfig(max_response_tokens=8, buffer_tokens=9)


def test_reward_modules_import_no_heavy_library():
    modules = ["reasoning_gym", "math_verify", "exact_match", "format", "overlong", "reward_set"]
    code = "import sys, " + ", ".join(f"rlpost.rewards.{name}" for name in modules)
    code += (
        "\nprint([m for m in ('torch', 'ray', 'reasoning_gym', 'math_verify', 'sympy')"
        " if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
