"""Process rewards in the rollout worker: columns, eval, rewards from steps, engines that fail."""

import math

import numpy as np
import pytest
from fake_engine import EOS, FakeEngine, FakeStore, FakeTokenizer, FakeWorker
from fake_rewards import pool_config, section

from rlpost.cluster import store
from rlpost.errors import EngineError, WorkerDiedError
from rlpost.prm.chain_steps import ChainSteps, ChainStepsConfig
from rlpost.prm.credit import CreditConfig
from rlpost.prm.limits import LimitsConfig
from rlpost.prm.model import ModelPrm, ModelPrmConfig
from rlpost.prm.steps import StepsConfig
from rlpost.prm.verifier import VerifierPrm, VerifierPrmConfig
from rlpost.rewards.reward_set import PartConfig, RewardSet, RewardSetConfig
from rlpost.rollout import worker as worker_module
from rlpost.rollout.classifiers import ClassifierPool
from rlpost.rollout.single_turn import SingleTurn, SingleTurnConfig
from rlpost.rollout.worker import RolloutWorker
from rlpost.types import Prompt, Sampling
from rlpost.validation import Section

ROLLOUT = SingleTurnConfig(
    temperature=1.0,
    top_p=1.0,
    max_prompt_tokens=8,
    max_response_tokens=32,
    generate_deadline_s=10.0,
    attempt_deadline_s=1.0,
    max_attempts=2,
    max_consecutive_failures=2,
)
PER_STEP = CreditConfig("step_normalized", 1.0, None, None, None, None)
INSIDE = CreditConfig("aggregate", None, None, None, "mean", 0.5)
LIMITS = LimitsConfig(1.0, 2, 100, 1.0, 100)
PROMPT = Prompt("chain/0", epoch=0, index=0, text="7+5-2=", answer="10")
NEWLINE = [ord("\n")]


def answer(*lines):
    """An engine's answer: these lines, then the end token after a last, empty line."""
    return ([*map(ord, "\n".join(lines)), EOS], "stop")


@pytest.fixture(autouse=True)
def objects(monkeypatch):
    fake = FakeStore()
    monkeypatch.setattr(store, "put", fake.put)
    monkeypatch.setattr(store, "fetch", fake.fetch)
    return fake


@pytest.fixture
def make(monkeypatch, tmp_path):
    async def build(prm, answers, prm_engines=()):
        monkeypatch.setattr(worker_module, "load_tokenizer", lambda path: Tokenizer())
        given = iter(answers)
        engine = FakeWorker(FakeEngine(lambda request: next(given)))
        parts = {"main": PartConfig(1.0, section("length"))}
        reward = RewardSetConfig(parts, "main", pool_config(timeout_s=5.0))
        made = RolloutWorker(
            Section("rollout", SingleTurn, ROLLOUT),
            model_path="",
            engines=[engine],
            reward=Section("reward", RewardSet, reward),
            group_size=2,
            seed=7,
            run_dir=tmp_path,
            prm=prm,
            prm_engines=prm_engines,
            prm_model_path="prm" if prm_engines else None,
        )
        await made.start()
        return made

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
    await worker.begin([PROMPT])
    group = await worker.finish(PROMPT.key)
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
    await worker.begin([PROMPT])
    group = await worker.finish(PROMPT.key)
    await worker.close()
    assert group.rewards[0] == 0.5 * len("7+5=12\n9") + 0.5 * 0.5
    assert math.isnan(group.rewards[1]), "no step could be judged: missing, not the outcome alone"


async def test_an_evaluation_is_not_scored_by_steps(make, objects):
    worker = await make(verifier(INSIDE), [answer("7+5=12", "9")])
    greedy = Sampling(0.0, 1.0, 32)
    await worker.begin([PROMPT], group_size=1, sampling=greedy, record="eval")
    group = await worker.finish(PROMPT.key)
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
    await worker.begin([PROMPT])
    group = await worker.finish(PROMPT.key)
    await worker.close()
    assert [len(ids) for ids in engine.asked] == [len(PROMPT.text) + 4] * 2
    # The steps end at positions 7 and 9.
    wanted = [1 / (1 + math.exp(10 - end)) for end in (7, 9)]
    assert group.step_rewards[0] == pytest.approx(wanted)


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
