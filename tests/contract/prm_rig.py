"""Step scorers of every kind, and engines that answer them by script."""

import math

import numpy as np

from rlpost.errors import EngineError
from rlpost.prm.base import Response, Services
from rlpost.prm.chain_steps import ChainSteps, ChainStepsConfig
from rlpost.prm.credit import CreditConfig
from rlpost.prm.judge import JudgePrmConfig
from rlpost.prm.limits import LimitsConfig
from rlpost.prm.model import ModelPrmConfig
from rlpost.prm.steps import StepsConfig
from rlpost.prm.verifier import VerifierPrmConfig
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
