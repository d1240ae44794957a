"""Cutting responses into steps, and a program that scores them."""

import math

import numpy as np
import pytest
from fake_engine import FakeTokenizer

from rlpost.errors import ConfigError, DataError
from rlpost.prm.chain_steps import ChainSteps, ChainStepsConfig
from rlpost.prm.steps import StepsConfig, separator_ids, split_steps
from rlpost.rewards.base import StepInputs
from rlpost.rewards.child import step_verdict
from rlpost.types import Prompt

CHAIN = ChainSteps(ChainStepsConfig())


def cut(token_ids, loss_mask, separators):
    steps = split_steps(np.array(token_ids), np.array(loss_mask, bool), separators)
    return steps.index_L.tolist(), steps.ends


def test_a_separator_ends_its_step_and_the_rest_is_the_last_one():
    assert cut([1, 9, 5, 9, 6, 9, 7], [0, 0, 1, 1, 1, 1, 1], [9]) == (
        [-1, -1, 0, 0, 1, 1, 2],
        (3, 5, 6),
    )


def test_a_response_that_ends_in_a_separator_has_no_empty_step():
    assert cut([1, 5, 9], [0, 1, 1], [9]) == ([-1, 0, 0], (2,))


def test_turns_are_steps_and_the_environment_s_tokens_belong_to_none():
    ids, mask = [1, 5, 6, 2, 9, 7], [0, 1, 1, 0, 0, 1]
    assert cut(ids, mask, []) == ([-1, 0, 0, -1, -1, 1], (2, 5))
    assert cut([1, 5, 9, 6, 9, 7], [*mask[:4], 0, 1], [9])[1] == (2, 5)


class Vocabulary(FakeTokenizer):
    tokens = ("<eos>", "\n", ".\n", "a")

    def __len__(self):
        return len(self.tokens)

    def decode(self, ids, **_):
        return "".join(self.tokens[token] for token in ids)


def test_every_token_that_holds_the_separator_ends_a_step():
    assert separator_ids("\n", Vocabulary()) == (1, 2)
    assert separator_ids([3], Vocabulary()) == (3,)
    assert separator_ids(None, Vocabulary()) == ()


def test_a_separator_that_no_token_holds_is_refused():
    with pytest.raises(ConfigError, match=r"separator \('###'\).*no step would ever end"):
        separator_ids("###", Vocabulary())
    with pytest.raises(ConfigError, match=r"\[7\] are no token ids"):
        separator_ids([7], Vocabulary())
    with pytest.raises(ValueError, match="names no token"):
        StepsConfig([])


def verified(*lines, text="7+5-2="):
    prompt = Prompt("chain/1", epoch=0, index=0, text=text, answer="10")
    return CHAIN.score_steps(StepInputs(prompt, lines))


@pytest.mark.parametrize(
    ("lines", "scores"),
    [
        (("7+5=12\n", "12-2=10\n", "10"), [1, 1, 1]),
        (("7+5=13\n", "13-2=11\n", "11"), [0, 1, 1]),  # one slip is blamed once
        (("7+5=12\n", "12+2=14\n", "14"), [1, 0, 1]),  # not the prompt's operation
        (("7+5=12\n", "12"), [1, 0]),  # stops early
        (("12-2=10\n", "10"), [0, 0]),  # skips the first operation
        (("7+5=12\n", "\n", "12-2=10\n", "10", "10"), [1, None, 1, 1, 0]),
        (("nonsense", "12-2=10"), [0, 0]),
        (("7+5=12\n", "12-2=10\n", "10-0=10\n"), [1, 1, 0]),  # more than was asked
    ],
)
def test_a_line_must_be_right_and_go_on_from_the_one_before(lines, scores):
    assert verified(*lines) == scores


def test_negative_terms_are_read():
    assert verified("5--3=8\n", "8+1=9\n", "9", text="5--3+1=") == [1, 1, 1]


def test_a_prompt_that_is_no_chain_is_an_error_not_a_zero():
    with pytest.raises(DataError, match=r"chain/1.*no chain of sums"):
        verified("1", text="What is one?")


def test_a_program_answers_for_every_step_with_numbers_or_none():
    verdict = step_verdict([1.0, None], 2)
    assert verdict.status == "ok" and verdict.steps[0] == 1.0 and math.isnan(verdict.steps[1])
    assert "1 scores for 2 steps" in step_verdict([1.0], 2).detail
    assert step_verdict([math.inf, None], 2).status == "error"
