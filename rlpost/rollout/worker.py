"""The rollout worker: prompts in, scored groups out. Runs in a process of its own.

Tasks: `begin` queues a prompt's requests on an engine at once; the `finish` of each prompt waits
for its engine, then for the reward processes, and puts the group into the object store. Both are
called by the driver; nothing runs that no call waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rlpost.cluster.workers import Worker
from rlpost.distillation.context import TeacherContext
from rlpost.errors import ConfigError, EngineError
from rlpost.rewards.budget import FailureBudget
from rlpost.rollout.base import RolloutConfig, Strategy
from rlpost.rollout.encoding import load_tokenizer
from rlpost.rollout.engine_pool import EnginePool
from rlpost.rollout.groups import GroupMaker
from rlpost.rollout.opening import Opener, Pending, pending_key
from rlpost.rollout.requests import Record
from rlpost.rollout.samples import samples_file, write_samples
from rlpost.rollout.scoring import PrmParts, Scoring
from rlpost.types import BlockRef, Generation, GroupHandle, Prompt, Sampling
from rlpost.validation import Section


class RolloutWorker:
    """Built from the sections `rollout`, `reward`, `prm`; `start` before use, `close` at the end.

    `prm_engines` are engines that serve the prm alone; `prm_model_path` is their model. `teacher`
    says which teacher scores a training prompt and what it reads.
    """

    def __init__(
        self,
        rollout: Section,
        *,
        model_path: str,
        engines: Sequence[Worker],
        reward: Section | None,
        group_size: int,
        seed: int,
        run_dir: Path,
        prm: Section | None = None,
        prm_engines: Sequence[Worker] = (),
        prm_model_path: str | None = None,
        teacher: TeacherContext | None = None,
    ) -> None:
        """Raises ConfigError when the parts don't fit together."""
        self._config: RolloutConfig = rollout.config
        self._strategy: Strategy = rollout.target(rollout.config)
        self._sampling = self._strategy.sampling(group_size)
        self._model_path = model_path
        self._group_size = group_size
        self._seed = seed
        self._samples_dir = Path(run_dir) / "samples"
        self._pending: dict[str, Pending] = {}
        self._engines, self._budget = self._engine_pool(engines)
        self._teacher = teacher
        asked = tuple(prm_engines) or tuple(engines)
        self._scoring = Scoring(reward, None if prm is None else PrmParts(prm, asked, seed))
        self._prm_model_path = prm_model_path

    async def start(self) -> None:
        """Loads the tokenizer and starts the reward processes. Raises BudgetError for those,
        ConfigError for a prm that does not fit the tokenizer."""
        tokenizer = scorer = await asyncio.to_thread(load_tokenizer, self._model_path)
        if self._prm_model_path is not None:
            scorer = await asyncio.to_thread(load_tokenizer, self._prm_model_path)
        self._opener = Opener(self._config, self._sampling, tokenizer, self._teacher, self._seed)
        self._groups = GroupMaker(self._strategy, self._scoring, tokenizer, self._budget)
        await self._scoring.start(tokenizer, scorer)

    async def begin(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int | None = None,
        sampling: Sampling | None = None,
        record: Record = "train",
        policy_version: int = 0,
    ) -> list[str]:
        """Submits the groups of these prompts, in order; returns the keys to `finish` them with.

        `sampling` None takes the strategy's own. `policy_version` labels tokens that no engine
        labels. Raises DataError for a prompt that can't be encoded, WorkerDiedError without living
        engines.
        """
        self._require_new([pending_key(record, prompt) for prompt in prompts])
        size = group_size or self._group_size
        opened = [
            self._opener.open(prompt, size, sampling, record=record, policy_version=policy_version)
            for prompt in prompts
        ]
        tickets = [pending.ticket for pending in opened if pending.ticket is not None]
        if tickets:
            await self._require_engines().submit(tickets)
        self._pending.update((pending.key, pending) for pending in opened)
        return [pending.key for pending in opened]

    async def finish(self, key: str) -> GroupHandle:
        """Waits for the group's answers and verdicts. A group that failed says so in `failure`.

        Raises BudgetError when rewards or engines fail too often, DataError for a prompt that the
        strategy can't use.
        """
        if key not in self._pending:
            raise ValueError(f"prompt {key!r} was not begun, or is finished already")
        pending = self._pending.pop(key)
        if pending.failure:
            return await self._groups.failed(pending, pending.failure)
        try:
            generations = await self._generations(pending)
        except EngineError as error:
            self._budget.failed(str(error))
            return await self._groups.failed(pending, "generation_failed")
        return await self._groups.scored(pending, generations)

    async def write_samples(
        self,
        step: int,
        entries: Sequence[tuple[GroupHandle, str]],
        blocks: Sequence[BlockRef] = (),
    ) -> Path:
        """Writes samples/step_<step>.parquet: every sample of the step and why it was dropped.

        `entries` are groups with a reason ("trained", or why not); `blocks` add columns to them.
        """
        path = samples_file(self._samples_dir, step)
        await asyncio.to_thread(write_samples, path, step, list(entries), list(blocks))
        return path

    async def close(self) -> None:
        """Ends the reward processes."""
        await self._scoring.close()

    async def _generations(self, pending: Pending) -> list[Generation]:
        if pending.ticket is None:
            return []
        return await self._require_engines().collect(pending.ticket)

    def _engine_pool(self, engines: Sequence[Worker]) -> tuple[EnginePool | None, FailureBudget]:
        attempts = self._strategy.attempts
        allowed = 0 if attempts is None else attempts.max_consecutive_failures
        budget = FailureBudget("generation", window=1, max_fraction=1.0, max_consecutive=allowed)
        if attempts is None:
            return None, budget
        if not engines:
            raise ConfigError(["engine: null, but this rollout asks an engine; set engine=vllm"])
        return EnginePool(engines, attempts), budget

    def _require_engines(self) -> EnginePool:
        if self._engines is None:
            raise ConfigError(
                [
                    "eval: answers have to be generated, but this rollout takes them from the data "
                    "and asks no engine; switch it off (~eval), or take rollout=single_turn"
                ]
            )
        return self._engines

    def _require_new(self, keys: Sequence[str]) -> None:
        twice = sorted({key for key in keys if key in self._pending or keys.count(key) > 1})
        if twice:
            raise ValueError(f"{len(twice)} prompts are begun twice: {', '.join(twice[:3])}")
