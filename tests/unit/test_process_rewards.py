"""Process rewards in the rollout worker: columns, eval, rewards from steps, engines that fail."""

import math
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import EOS, FakeEngine, FakeTokenizer, FakeWorker
from fake_rewards import pool_config
from rollout_rig import SINGLE_TURN, groups, rewards

from rlpost.errors import EngineError, WorkerDiedError
from rlpost.prm.chain_steps import ChainSteps, ChainStepsConfig
from rlpost.prm.credit import CreditConfig
from rlpost.prm.limits import LimitsConfig
from rlpost.prm.model import ModelPrm, ModelPrmConfig
from rlpost.prm.steps import StepsConfig
from rlpost.prm.verifier import VerifierPrm, VerifierPrmConfig
from rlpost.rollout import saved
from rlpost.rollout.classifiers import ClassifierPool
from rlpost.rollout.saved import SavedSamples
from rlpost.types import Prompt, Sampling
from rlpost.validation import Section

PER_STEP = CreditConfig("step_normalized", 1.0, None, None, None, None)
INSIDE = CreditConfig("aggregate", None, None, None, "mean", 0.5)
LIMITS = LimitsConfig(1.0, 2, 100, 1.0, 100)
PROMPT = Prompt("chain/0", epoch=0, index=0, text="7+5-2=", answer="10")
NEWLINE = [ord("\n")]


def answer(*lines):
    """An engine's answer: these lines, then the end token after a last, empty line."""
    return ([*map(ord, "\n".join(lines)), EOS], "stop")


@pytest.fixture
def make(make_worker):
    async def build(prm, answers, prm_engines=()):
        given = iter(answers)
        return await make_worker(
            [FakeEngine(lambda request: next(given))],
            config=replace(SINGLE_TURN, max_response_tokens=32),
            tokenizer=Tokenizer(),
            reward=rewards(main="length"),
            prm=prm,
            prm_engines=prm_engines,
            prm_model_path="prm" if prm_engines else None,
        )

    return build


class Tokenizer(FakeTokenizer):
    def get_vocab(self):
        return {}

    def __len__(self):
        return 128


def verifier(credit=PER_STEP):
    program = Section("prm.program", ChainSteps, ChainStepsConfig())
    config = VerifierPrmConfig(credit, StepsConfig(NEWLINE), program, pool_config(timeout_s=5.0))
    return Section("prm", VerifierPrm, config)


async def test_a_group_carries_the_scores_of_its_steps(make, objects):
    worker = await make(verifier(), [answer("7+5=12", "12-2=10", "10"), answer("7+5=1", "")])
    (group,) = await groups(worker, [PROMPT])
    await worker.close()
    assert group.step_rewards[0] == (1.0, 1.0, 1.0)
    assert group.step_rewards[1] == pytest.approx((0.0, math.nan), nan_ok=True)
    right, wrong = (row for _, row in objects.fetch(group.block).rows())
    start = len(PROMPT.text)
    assert right["step_index"].tolist() == [-1] * start + [0] * 7 + [1] * 8 + [2] * 3
    assert wrong["step_index"].tolist() == [-1] * start + [0] * 6 + [1]
    assert wrong["step_scores"] == pytest.approx([0.0, math.nan], nan_ok=True)
    assert group.rewards == (len("7+5=12\n12-2=10\n10"), len("7+5=1\n"))


async def test_an_aggregate_is_part_of_the_reward_the_group_carries(make):
    worker = await make(verifier(INSIDE), [answer("7+5=12", "9"), answer("")])
    (group,) = await groups(worker, [PROMPT])
    await worker.close()
    assert group.rewards[0] == 0.5 * len("7+5=12\n9") + 0.5 * 0.5
    assert math.isnan(group.rewards[1]), "no step could be judged: missing, not the outcome alone"


async def test_an_evaluation_is_not_scored_by_steps(make, objects):
    worker = await make(verifier(INSIDE), [answer("7+5=12", "9")])
    greedy = Sampling(0.0, 1.0, 32)
    (group,) = await groups(worker, [PROMPT], group_size=1, sampling=greedy, record="eval")
    await worker.close()
    assert group.step_rewards == () and group.rewards == (len("7+5=12\n9"),)
    assert "step_index" not in objects.fetch(group.block).tokens


class FakeClassifier:
    """Label 1 is likelier the later the token; `fail` raises."""

    def __init__(self, fail=False):
        self.fail, self.asked = fail, []

    async def classify(self, token_ids):
        self.asked.append(token_ids)
        if self.fail:
            raise EngineError("prm[0] died")
        places = np.arange(len(token_ids), dtype=np.float32)
        return np.stack([np.zeros_like(places), places - 10], axis=1)


def model_prm():
    config = ModelPrmConfig(PER_STEP, StepsConfig(NEWLINE), None, None, 1, LIMITS)
    return Section("prm", ModelPrm, config)


async def test_a_model_is_asked_once_per_response_and_read_at_step_ends(make):
    engine = FakeClassifier()
    worker = await make(model_prm(), [answer("1", "2")] * 2, [FakeWorker(engine)])
    (group,) = await groups(worker, [PROMPT])
    await worker.close()
    assert [len(ids) for ids in engine.asked] == [len(PROMPT.text) + 4] * 2
    # The steps end at positions 7 and 9.
    wanted = [1 / (1 + math.exp(10 - end)) for end in (7, 9)]
    assert group.step_rewards[0] == pytest.approx(wanted)


async def test_a_saved_group_has_the_numbers_of_the_group_that_was_trained(
    make, monkeypatch, tmp_path
):
    """Training again on saved samples then gives the same advantages, bit for bit."""
    worker = await make(model_prm(), [answer("1", "2")] * 2, [FakeWorker(FakeClassifier())])
    (group,) = await groups(worker, [PROMPT])
    await worker.write_samples(1, [(group, "trained")])
    await worker.close()
    monkeypatch.setattr(saved, "load_tokenizer", lambda path: Tokenizer())
    reader = SavedSamples(
        source=tmp_path, model_path="", prompts_per_step=1, group_size=2, teachers=(),
        run_dir=tmp_path / "again",
    )  # fmt: skip
    await reader.start(num_steps=1)
    (again,) = await reader.groups(1)
    unsaved = {"block": None, "generate_s": 0.0, "reward_s": 0.0}
    assert replace(again, **unsaved) == replace(group, **unsaved)


async def test_an_engine_that_fails_is_left_for_another():
    bad, good = FakeClassifier(fail=True), FakeClassifier()
    pool = ClassifierPool([FakeWorker(bad), FakeWorker(good, 1)], deadline_s=1.0, max_attempts=2)
    assert len(await pool.classify([1, 2, 3])) == 3
    assert len(bad.asked) == len(good.asked) == 1


async def test_a_dead_engine_gets_no_more_work():
    workers = [FakeWorker(FakeClassifier()), FakeWorker(FakeClassifier(), 1)]
    workers[0].dead = True
    pool = ClassifierPool(workers, deadline_s=1.0, max_attempts=2)
    for _ in range(3):
        await pool.classify([1])
    assert len(workers[1].hosted.asked) == 3
    workers[1].dead = True
    with pytest.raises(WorkerDiedError, match=r"none of 2 engines is alive: \w+\[0\] died"):
        await pool.classify([1])
