"""What every step scorer keeps to: a score or NaN for each step, and nothing made up."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rlpost.errors import BudgetError, ConfigError, EngineError
from rlpost.prm.base import Response, Services
from rlpost.prm.chain_steps import ChainSteps, ChainStepsConfig
from rlpost.prm.credit import CreditConfig
from rlpost.prm.judge import JudgePrm, JudgePrmConfig, settled, vote_of
from rlpost.prm.limits import LimitsConfig
from rlpost.prm.model import ModelPrm, ModelPrmConfig, probability
from rlpost.prm.steps import StepsConfig
from rlpost.prm.verifier import VerifierPrm, VerifierPrmConfig
from rlpost.rewards.base import StepInputs
from rlpost.rewards.pool import PoolConfig
from rlpost.types import Generation, Prompt
from rlpost.validation import Section

NAN = math.nan
CREDIT = CreditConfig("step_normalized", 1.0, None, None, None, None)
LIMITS = LimitsConfig(
    deadline_s=1.0,
    max_attempts=1,
    failure_window=100,
    max_failure_fraction=1.0,
    max_consecutive_failures=1,
)
VERIFIER = VerifierPrmConfig(
    credit=CREDIT,
    steps=StepsConfig("\n"),
    program=Section("prm.program", ChainSteps, ChainStepsConfig()),
    pool=PoolConfig(
        num_processes=1,
        timeout_s=30.0,
        start_timeout_s=60.0,
        failure_window=100,
        max_failure_fraction=1.0,
        max_consecutive_failures=1,
    ),
)
MODEL = ModelPrmConfig(CREDIT, StepsConfig("\n"), None, None, 1, LIMITS)
JUDGE = JudgePrmConfig(
    credit=CREDIT,
    steps=StepsConfig("\n"),
    model=None,
    engine=None,
    template="{prompt}|{before}|{step}?",
    chat=False,
    verdict_pattern=r"(?i)\b(yes|no|maybe)\b",
    good_verdict="yes",
    bad_verdict="no",
    num_votes=3,
    rule="majority",
    temperature=1.0,
    max_verdict_tokens=8,
    limits=LIMITS,
)
PROMPT = Prompt("chain/1", epoch=0, index=0, text="7+5-2=", answer="10")
RESPONSE = Response(
    sample="chain/1@0#0",
    inputs=StepInputs(PROMPT, ("7+5=12\n", "12-2=11\n")),
    token_ids=(1, 2, 3, 4),
    ends=(2, 3),
)


class Characters:
    """Ids are code points."""

    unk_token_id, chat_template = None, None

    def __init__(self, extra=()):
        self.extra = extra

    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids))

    def get_vocab(self):
        return {"a": 97, **dict.fromkeys(self.extra, 1)}


class Engines:
    """Answers a judge with texts by (step, vote), a classifier with fixed outputs."""

    def __init__(self, answers=(), outputs=None, fail=False):
        self.answers, self.outputs, self.fail = list(answers), outputs, fail
        self.asked = []

    async def generate(self, requests):
        if self.fail:
            raise EngineError("engine[0] died")
        self.asked += requests
        return [
            Generation(
                request.request_id,
                token_ids=np.array([ord(character) for character in text], np.int32),
                logprobs=np.zeros(len(text), np.float32),
                policy_versions=np.zeros(len(text), np.int32),
                finish_reason="stop",
            )
            for request, text in zip(requests, self.answers, strict=True)
        ]

    async def classify(self, token_ids):
        if self.fail:
            raise EngineError("prm[0] died")
        return self.outputs

    def services(self, scorer_tokenizer=None):
        return Services(
            tokenizer=Characters(),
            scorer_tokenizer=scorer_tokenizer or Characters(),
            generate=self.generate,
            classify=self.classify,
            seed_of=lambda sample, step, vote: 10 * step + vote,
        )


GOOD = Engines(
    answers=["yes", "no", "Yes.", "no", "no", "yes"],
    outputs=np.array([[9, 0], [9, 0], [0, 3], [3, 0]], np.float32),
)
SCORERS = {
    "verifier": (VerifierPrm, VERIFIER),
    "model": (ModelPrm, MODEL),
    "judge": (JudgePrm, JUDGE),
}


@pytest.mark.parametrize("name", SCORERS)
async def test_each_step_gets_one_score_and_the_better_step_the_higher(name):
    scorer, config = SCORERS[name]
    built = scorer(config, services=GOOD.services())
    await built.start()
    try:
        right, wrong = await built.score(RESPONSE)
    finally:
        await built.close()
    assert 0.0 <= wrong < right <= 1.0


@pytest.mark.parametrize("name", ["model", "judge"])
async def test_a_dead_engine_leaves_steps_missing_until_the_budget_is_spent(name):
    scorer, config = SCORERS[name]
    built = scorer(config, services=Engines(fail=True).services())
    assert np.isnan(await built.score(RESPONSE)).all()
    with pytest.raises(BudgetError, match=r"prm \(.*chain/1@0#0.*died"):
        await built.score(RESPONSE)


async def test_a_program_that_fails_leaves_steps_missing_until_the_budget_is_spent():
    built = VerifierPrm(VERIFIER, services=GOOD.services())
    await built.start()
    odd = replace(RESPONSE, inputs=StepInputs(replace(PROMPT, text="What?"), ("1", "2")))
    try:
        assert np.isnan(await built.score(odd)).all()
        with pytest.raises(BudgetError, match="no chain of sums"):
            await built.score(odd)
    finally:
        await built.close()


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


def test_a_verdict_whose_optional_group_is_absent_is_missing():
    config = replace(JUDGE, verdict_pattern=r"verdict: ?(yes|no)?")
    assert math.isnan(vote_of("verdict: unclear", config))


def test_outputs_become_probabilities_by_softmax_or_sigmoid():
    two = np.array([[1.0, 3.0], [1000.0, 0.0]], np.float32)
    assert probability(two, 1) == pytest.approx([1 / (1 + math.exp(-2)), 0.0])
    assert probability(two[:, 1:] - two[:, :1], 1) == pytest.approx(probability(two, 1))
    with pytest.raises(ConfigError, match="labels 0 to 1"):
        probability(two, 2)


async def test_a_classifier_with_another_vocabulary_is_refused():
    other = GOOD.services(scorer_tokenizer=Characters(extra=("b",)))
    with pytest.raises(ConfigError, match="another vocabulary"):
        await ModelPrm(MODEL, services=other).start()


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


def test_progress_needs_values():
    config = replace(VERIFIER, credit=CreditConfig("progress", 1.0, None, 0.5, None, None))
    (line,) = config.conflicts(None)
    assert "prm.credit.mode: progress" in line and "prm=model" in line
