"""From the rollouts of a group to its columns and to the handle that the driver keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlpost.rewards.reward_set import Score, value_of
from rlpost.rollout.base import Rollout
from rlpost.rollout.process_rewards import StepScores
from rlpost.types import Array, BlockRef, GroupHandle, Prompt, SampleBlock, sample_id

# Columns of a part of the reward: its value, and the status of its verdict.
PART, VERDICT = "reward/", "verdict/"


@dataclass(frozen=True)
class GroupText:
    """What the samples file shows to people."""

    prompt: str
    responses: tuple[str, ...]  # [G]


def make_block(
    prompt: Prompt,
    rollouts: Sequence[Rollout],
    scores: Sequence[Score],
    text: GroupText,
    steps: Sequence[StepScores] = (),
) -> SampleBlock:
    """All columns of a group. `scores` is empty for a group that was not scored: all NaN.

    With `steps` [G] the per-token column step_index and the samples' step_scores are there too.
    Text columns and step_scores are object arrays; the others numeric or fixed-width strings.
    """
    return SampleBlock(
        sample_ids=tuple(sample_id(prompt.key, index) for index in range(len(rollouts))),
        lengths=np.array([len(rollout.token_ids) for rollout in rollouts], np.int64),
        tokens={
            "token_ids": np.concatenate([rollout.token_ids for rollout in rollouts]),
            "loss_mask": np.concatenate([rollout.loss_mask for rollout in rollouts]),
            "rollout_logprobs": np.concatenate([rollout.logprobs for rollout in rollouts]),
            "policy_versions": np.concatenate([rollout.policy_versions for rollout in rollouts]),
        }
        | _step_tokens(steps),
        scalars=_rollout_scalars(rollouts)
        | _score_scalars(scores, len(rollouts))
        | _step_scalars(steps)
        | _text_scalars(prompt, text),
    )


def with_teacher_prompt(block: SampleBlock, token_ids: Sequence[int]) -> SampleBlock:
    """Adds teacher_prompt_ids [N, P]: the samples of a group share their prompt."""
    column = np.tile(np.array(token_ids, np.int32), (len(block.sample_ids), 1))
    return replace(block, scalars={**block.scalars, "teacher_prompt_ids": column})


def _rollout_scalars(rollouts: Sequence[Rollout]) -> dict[str, Array]:
    reasons = [rollout.finish_reason for rollout in rollouts]
    return {
        "prompt_length": np.array([rollout.prompt_length for rollout in rollouts], np.int64),
        "finish_reason": np.array(reasons),
        "truncated": np.array([reason == "length" for reason in reasons]),
    }


def _score_scalars(scores: Sequence[Score], size: int) -> dict[str, Array]:
    if not scores:
        missing = np.full(size, np.nan)
        return {"reward": missing, "accuracy": missing}
    columns = {
        "reward": np.array([score.total for score in scores]),
        "accuracy": np.array([score.accuracy for score in scores]),
    }
    for part in scores[0].verdicts:
        verdicts = [score.verdicts[part] for score in scores]
        columns[f"{PART}{part}"] = np.array([value_of(verdict) for verdict in verdicts])
        columns[f"{VERDICT}{part}"] = np.array([verdict.status for verdict in verdicts])
    return columns


def _step_tokens(steps: Sequence[StepScores]) -> dict[str, Array]:
    if not steps:
        return {}
    return {"step_index": np.concatenate([scored.steps.index_L for scored in steps])}


def _step_scalars(steps: Sequence[StepScores]) -> dict[str, Array]:
    if not steps:
        return {}
    return {"step_scores": as_objects([np.array(scored.scores) for scored in steps])}


def as_objects(values: Sequence[Array]) -> Array:
    """[N] arrays of uneven length as one column."""
    column = np.empty(len(values), object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def _text_scalars(prompt: Prompt, text: GroupText) -> dict[str, Array]:
    size = len(text.responses)
    return {
        "prompt": np.array([text.prompt] * size, object),
        "response": np.array(text.responses, object),
        "answer": np.array([prompt.answer] * size, object),
    }


def make_handle(
    prompt_key: str,
    block: SampleBlock,
    ref: BlockRef,
    *,
    generate_s: float,
    reward_s: float,
    teacher: str = "",
) -> GroupHandle:
    """The handle of a group that can be trained: what its block says, in small scalars."""
    mask = block.tokens["loss_mask"]
    starts = np.cumsum(block.lengths) - block.lengths
    return GroupHandle(
        prompt_key=prompt_key,
        sample_ids=block.sample_ids,
        block=ref,
        rewards=tuple(block.scalars["reward"].tolist()),
        accuracies=tuple(block.scalars["accuracy"].tolist()),
        lengths=tuple(block.lengths.tolist()),
        loss_tokens=tuple(np.add.reduceat(mask.astype(np.int64), starts).tolist()),
        finish_reasons=tuple(block.scalars["finish_reason"].tolist()),
        oldest_version=int(block.tokens["policy_versions"][mask].min()),
        verdict_counts=_verdict_counts(block),
        generate_s=generate_s,
        reward_s=reward_s,
        step_rewards=tuple(tuple(row.tolist()) for row in block.scalars.get("step_scores", ())),
        part_rewards={
            name.removeprefix(PART): tuple(column.tolist())
            for name, column in block.scalars.items()
            if name.startswith(PART)
        },
        teacher=teacher,
    )


def _verdict_counts(block: SampleBlock) -> dict[str, int]:
    columns = [column for name, column in block.scalars.items() if name.startswith(VERDICT)]
    return dict(Counter(status for column in columns for status in column.tolist()))


def failed_handle(prompt: Prompt, failure: str, *, ref: BlockRef, generate_s: float) -> GroupHandle:
    """The handle of a group that can't be trained. `ref` holds what is known, for the record."""
    return GroupHandle(
        prompt_key=prompt.key,
        sample_ids=(),
        block=ref,
        rewards=(),
        accuracies=(),
        lengths=(),
        loss_tokens=(),
        finish_reasons=(),
        oldest_version=0,
        verdict_counts={},
        generate_s=generate_s,
        reward_s=0.0,
        failure=failure,
    )
