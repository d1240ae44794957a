"""What every step scorer keeps to: a score or NaN for each step, and nothing made up."""

import math
from dataclasses import replace

import numpy as np
import pytest
from prm_rig import GOOD, JUDGE, MODEL, PROMPT, RESPONSE, VERIFIER, Characters, Engines

from rlpost.errors import BudgetError, ConfigError
from rlpost.prm.credit import CreditConfig
from rlpost.prm.judge import JudgePrm
from rlpost.prm.model import ModelPrm, probability
from rlpost.prm.verifier import VerifierPrm
from rlpost.rewards.base import StepInputs

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


def test_progress_needs_values():
    config = replace(VERIFIER, credit=CreditConfig("progress", 1.0, None, 0.5, None, None))
    (line,) = config.conflicts(None)
    assert "prm.credit.mode: progress" in line and "prm=model" in line
