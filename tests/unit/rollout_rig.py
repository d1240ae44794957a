"""Parts of a rollout worker whose engines, object store and tokenizer are fakes."""

from collections.abc import Callable
from pathlib import Path

from fake_engine import FakeTokenizer, FakeWorker
from fake_rewards import pool_config, section

from rlpost.rewards.reward_set import PartConfig, RewardSet, RewardSetConfig
from rlpost.rollout.reference import ReferenceRolloutConfig
from rlpost.rollout.single_turn import SingleTurn, SingleTurnConfig
from rlpost.rollout.worker import RolloutWorker
from rlpost.types import Prompt
from rlpost.validation import Section

SINGLE_TURN = SingleTurnConfig(
    temperature=1.0,
    top_p=1.0,
    max_prompt_tokens=8,
    max_response_tokens=16,
    generate_deadline_s=10.0,
    attempt_deadline_s=0.3,
    max_attempts=2,
    max_consecutive_failures=2,
)
REFERENCE = ReferenceRolloutConfig(
    max_prompt_tokens=8, max_response_tokens=16, generate_deadline_s=10.0
)


class Maker:
    """`await maker(engines)` starts a worker over them; its engines' handles are `handles`.

    `use_tokenizer` is told what the worker will load; a reward of None needs no processes.
    """

    def __init__(self, run_dir: Path, use_tokenizer: Callable[[object], None]):
        self.run_dir, self.use_tokenizer, self.handles = run_dir, use_tokenizer, []

    async def __call__(self, engines, *, config=SINGLE_TURN, target=SingleTurn, **changes):
        self.use_tokenizer(changes.pop("tokenizer", FakeTokenizer()))
        self.handles = [FakeWorker(engine, rank) for rank, engine in enumerate(engines)]
        arguments = {
            "model_path": "",
            "engines": self.handles,
            "reward": None,
            "group_size": 2,
            "seed": 7,
            "run_dir": self.run_dir,
        }
        worker = RolloutWorker(Section("rollout", target, config), **arguments | changes)
        await worker.start()
        return worker


def prompts(count, text="1+1="):
    return [Prompt(f"p/{n}", epoch=0, index=n, text=text, answer="2") for n in range(count)]


def rewards(timeout_s=5.0, **modes):
    """A section `reward`: part -> what it does (see fake_rewards)."""
    parts = {name: PartConfig(1.0, section(mode)) for name, mode in modes.items()}
    config = RewardSetConfig(parts, next(iter(modes)), pool_config(timeout_s=timeout_s))
    return Section("reward", RewardSet, config)


async def groups(worker, asked, **kwargs):
    keys = await worker.begin(asked, **kwargs)
    return [await worker.finish(key) for key in keys]
