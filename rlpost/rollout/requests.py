"""What engines are asked for a group, and whether what came back can be trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from rlpost.data.order import stable_hash
from rlpost.rollout.base import NO_VERSION, Rollout
from rlpost.types import GenerateRequest, Prompt, Sampling, sample_id

Record = Literal["train", "eval"]


def group_requests(
    prompt: Prompt,
    prompt_ids: Sequence[int],
    group_size: int,
    sampling: Sampling,
    *,
    record: Record,
    run_seed: int,
) -> tuple[GenerateRequest, ...]:
    """One request per rollout [G]; they differ in id and seed."""
    return tuple(
        GenerateRequest(
            request_id=f"{record}:{sample_id(prompt.key, index)}",
            token_ids=tuple(prompt_ids),
            sampling=sampling,
            seed=sampling_seed(run_seed, prompt, index, turn=0),
        )
        for index in range(group_size)
    )


def sampling_seed(run_seed: int, prompt: Prompt, rollout_index: int, *, turn: int) -> int:
    """A function of the request's identity alone: a retry or rerun samples the same anywhere."""
    return stable_hash(run_seed, prompt.prompt_id, prompt.epoch, rollout_index, turn, bits=31)


def group_failure(rollouts: Sequence[Rollout]) -> str:
    """Why the group can't be trained as complete answers; "" if it can."""
    if any(rollout.finish_reason == "abort" for rollout in rollouts):
        return "aborted"
    if not all(rollout.loss_mask.any() for rollout in rollouts):
        return "empty_response"
    return ""


def unanswered(prompt_ids: Sequence[int]) -> Rollout:
    """The prompt alone, for the record of a group that got no answer."""
    size = len(prompt_ids)
    return Rollout(
        token_ids=np.array(prompt_ids, np.int32),
        loss_mask=np.zeros(size, bool),
        logprobs=np.full(size, np.nan, np.float32),
        policy_versions=np.full(size, NO_VERSION, np.int32),
        prompt_length=size,
        finish_reason="abort",
    )
