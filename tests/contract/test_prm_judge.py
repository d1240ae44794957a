"""The judge: what it is asked, how its votes settle, which options make sense."""

import math
from dataclasses import replace

import pytest
from prm_rig import GOOD, JUDGE, NAN, RESPONSE, Characters, Engines

from rlpost.errors import BudgetError, ConfigError
from rlpost.prm.judge import JudgePrm, settled, vote_of
from rlpost.validation import Section


async def test_a_judge_sees_the_steps_before_and_votes_have_seeds_of_their_own():
    engines = Engines(answers=["yes"] * 6)
    await JudgePrm(JUDGE, services=engines.services()).score(RESPONSE)
    texts = ["".join(map(chr, request.token_ids)) for request in engines.asked]
    assert texts == ["7+5-2=||7+5=12\n?"] * 3 + ["7+5-2=|7+5=12\n|12-2=11\n?"] * 3
    assert [request.seed for request in engines.asked] == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize(
    ("votes", "majority", "mean"),
    [
        ([1, 1, 0], 1.0, 2 / 3),
        ([1, NAN, NAN], 1.0, 1.0),
        ([1, 0, NAN], NAN, 0.5),  # a tie is missing, an unreadable vote is not a no
        ([NAN, NAN], NAN, NAN),
        ([0, 0, NAN], 0.0, 0.0),
    ],
)
def test_votes_settle_by_rule(votes, majority, mean):
    assert settled(votes, "majority") == pytest.approx(majority, nan_ok=True)
    assert settled(votes, "mean") == pytest.approx(mean, nan_ok=True)


@pytest.mark.parametrize(
    ("text", "vote"),
    [("Yes", 1.0), ("no, rather yes", 1.0), ("NO", 0.0), ("maybe", NAN), ("", NAN), ("yesno", NAN)],
)
def test_a_vote_that_can_t_be_read_is_missing(text, vote):
    assert vote_of(text, JUDGE) == pytest.approx(vote, nan_ok=True)


async def test_a_judge_that_gives_no_readable_verdict_spends_its_budget():
    judge = JudgePrm(JUDGE, services=Engines(answers=["maybe"] * 6).services())
    scores = await judge.score(RESPONSE)
    assert all(map(math.isnan, scores))
    with pytest.raises(BudgetError, match=r"prm\.verdict_pattern finds no verdict.*'maybe'"):
        await judge.score(RESPONSE)


def test_a_verdict_whose_optional_group_is_absent_is_missing():
    config = replace(JUDGE, verdict_pattern=r"verdict: ?(yes|no)?")
    assert math.isnan(vote_of("verdict: unclear", config))


async def test_a_judge_that_can_t_read_the_question_is_refused():
    class Digits(Characters):
        unk_token_id = 0

        def encode(self, text):
            return [0 for _ in text]

    with pytest.raises(ConfigError, match=r"prm\.template.*vocabulary"):
        await JudgePrm(JUDGE, services=GOOD.services(scorer_tokenizer=Digits())).start()
    with pytest.raises(ConfigError, match=r"prm\.chat.*no chat template"):
        await JudgePrm(replace(JUDGE, chat=True), services=GOOD.services()).start()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"template": "{answer}{step}"}, r"template may hold \{prompt\}"),
        ({"template": "is it right?"}, r"must hold \{step\}"),
        ({"verdict_pattern": "(yes)|(no)"}, "has 2 groups"),
        ({"bad_verdict": "YES"}, "both"),
        ({"temperature": 0.0}, "copies of one vote"),
        ({"model": Section("m", object, None)}, "go together"),
    ],
)
def test_a_judge_s_options_must_make_sense(changes, problem):
    with pytest.raises(ValueError, match=problem):
        replace(JUDGE, **changes)
