"""The rollout worker: prompts in, scored groups out. Runs in a process of its own.

Tasks: `begin` queues a prompt's requests on an engine at once; the `finish` of each prompt waits
for its engine, then for the reward processes, and puts the group into the object store. Both are
called by the driver; nothing runs that no call waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlpost.cluster import store
from rlpost.cluster.workers import Worker
from rlpost.distillation.context import TeacherContext
from rlpost.errors import ConfigError, EngineError
from rlpost.rewards.budget import FailureBudget
from rlpost.rollout.base import Rollout, RolloutConfig, Strategy, Tokenizer
from rlpost.rollout.blocks import (
    GroupText,
    failed_handle,
    make_block,
    make_handle,
    with_teacher_prompt,
)
from rlpost.rollout.encoding import decode_response, load_tokenizer
from rlpost.rollout.engine_pool import EnginePool
from rlpost.rollout.opening import Opener, Pending
from rlpost.rollout.requests import Record, group_failure, unanswered
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
        self._tokenizer: Tokenizer = None
        self._engines, self._budget = self._engine_pool(engines)
        self._teacher = teacher
        asked = tuple(prm_engines) or tuple(engines)
        self._scoring = Scoring(reward, None if prm is None else PrmParts(prm, asked, seed))
        self._prm_model_path = prm_model_path

    async def start(self) -> None:
        """Loads the tokenizer and starts the reward processes. Raises BudgetError for those,
        ConfigError for a prm that does not fit the tokenizer."""
        self._tokenizer = scorer = await asyncio.to_thread(load_tokenizer, self._model_path)
        if self._prm_model_path is not None:
            scorer = await asyncio.to_thread(load_tokenizer, self._prm_model_path)
        self._opener = Opener(
            self._config, self._sampling, self._tokenizer, self._teacher, self._seed
        )
        await self._scoring.start(self._tokenizer, scorer)

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
        self._require_new(prompts)
        size = group_size or self._group_size
        opened = [
            self._opener.open(prompt, size, sampling, record=record, policy_version=policy_version)
            for prompt in prompts
        ]
        tickets = [pending.ticket for pending in opened if pending.ticket is not None]
        if tickets:
            await self._require_engines().submit(tickets)
        self._pending.update((pending.prompt.key, pending) for pending in opened)
        return [prompt.key for prompt in prompts]

    async def finish(self, prompt_key: str) -> GroupHandle:
        """Waits for the group's answers and verdicts. A group that failed says so in `failure`.

        Raises BudgetError when rewards or engines fail too often, DataError for a prompt that the
        strategy can't use.
        """
        if prompt_key not in self._pending:
            raise ValueError(f"prompt {prompt_key!r} was not begun, or is finished already")
        pending = self._pending.pop(prompt_key)
        if pending.failure:
            return await self._failed(pending, pending.failure)
        try:
            generations = await self._generations(pending)
        except EngineError as error:
            self._budget.failed(str(error))
            return await self._failed(pending, "generation_failed")
        return await self._group(pending, generations)

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

    async def _group(self, pending: Pending, generations: Sequence[Generation]) -> GroupHandle:
        generate_s = time.monotonic() - pending.started
        rollouts = self._strategy.rollouts(
            pending.prompt,
            pending.prompt_ids,
            generations,
            tokenizer=self._tokenizer,
            policy_version=pending.policy_version,
        )
        if failure := group_failure(rollouts):
            self._budget.failed(f"prompt {pending.prompt.key!r}: {failure}")
            return await self._dropped(pending, rollouts, failure, generate_s)
        self._budget.succeeded()
        started = time.monotonic()
        text = self._text(pending, rollouts)
        # An evaluation has no use for scores of steps.
        scores, steps = await self._scoring.score(
            pending.prompt, rollouts, text.responses, with_steps=pending.record == "train"
        )
        block = make_block(pending.prompt, rollouts, scores, text, steps)
        if pending.teacher_prompt_ids is not None:
            block = with_teacher_prompt(block, pending.teacher_prompt_ids)
        handle = make_handle(
            pending.prompt,
            block,
            await asyncio.to_thread(store.put, block),
            scores=scores,
            generate_s=generate_s,
            reward_s=time.monotonic() - started,
            steps=steps,
        )
        return replace(handle, teacher=pending.teacher)

    async def _failed(self, pending: Pending, failure: str) -> GroupHandle:
        """A group without answers; its prompt is kept for the samples file."""
        generate_s = time.monotonic() - pending.started if pending.ticket else 0.0
        rollouts = [unanswered(pending.prompt_ids)]
        return await self._dropped(pending, rollouts, failure, generate_s)

    async def _dropped(
        self, pending: Pending, rollouts: Sequence[Rollout], failure: str, generate_s: float
    ) -> GroupHandle:
        block = make_block(pending.prompt, rollouts, [], self._text(pending, rollouts))
        ref = await asyncio.to_thread(store.put, block)
        return failed_handle(pending.prompt, failure, ref=ref, generate_s=generate_s)

    def _text(self, pending: Pending, rollouts: Sequence[Rollout]) -> GroupText:
        return GroupText(
            prompt=str(self._tokenizer.decode(pending.prompt_ids)),
            responses=tuple(
                decode_response(self._tokenizer, rollout.response_ids) for rollout in rollouts
            ),
        )

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

    def _require_new(self, prompts: Sequence[Prompt]) -> None:
        keys = [prompt.key for prompt in prompts]
        twice = sorted({key for key in keys if key in self._pending or keys.count(key) > 1})
        if twice:
            raise ValueError(f"{len(twice)} prompts are begun twice: {', '.join(twice[:3])}")
