"""The vocabulary: what moves between the rooms. Frozen, plain numpy, no torch.

Letters on shapes: N samples, L tokens of one sample (prompt and response), T tokens of many
samples laid end to end (T = sum of L), G rollouts of one prompt.

Token alignment, everywhere: entry t of a per-token array speaks of token t itself. A log-prob at t
is log p(token_t | tokens before t); the first response token's log-prob therefore lies at index
`prompt_length`, and comes from the model's output at position `prompt_length - 1`.
What is missing is NaN (floats), never 0.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]
VerdictStatus = Literal["ok", "timeout", "error"]
Array = npt.NDArray[Any]
BlockRef = Any  # opaque reference to a SampleBlock in the object store (cluster.store.StoreRef)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data set at one visit.

    `prompt_id` is stable across epochs and runs; (`epoch`, `index`) is the place in the order.
    `messages` is chat form; a plain string prompt is `text`. Exactly one of the two is given.
    `completion` is a worked answer to imitate (supervised training); else None.

        Prompt("chain_sum/17", epoch=0, index=3, text="7+5-2=", answer="10")
    """

    prompt_id: str
    epoch: int
    index: int
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    answer: str = ""
    completion: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Identity of this visit: what the ledger and the groups are keyed by."""
        return f"{self.prompt_id}@{self.epoch}"


def sample_id(prompt_key: str, rollout_index: int) -> str:
    """Identity of one rollout of one visit: `chain_sum/17@0#5`."""
    return f"{prompt_key}#{rollout_index}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine samples. Log-probs are reported as the engine applied these settings."""

    temperature: float
    top_p: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`token_ids` [prompt length]; `seed` is derived from the request's identity."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One engine answer. `token_ids` includes the stop token when `finish_reason` is "stop".

    token_ids, logprobs, policy_versions: [response length]
    """

    request_id: str
    token_ids: Array  # int32
    logprobs: Array  # float32
    policy_versions: Array  # int32
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward's answer. `value` is None unless `status` is "ok": missing is not 0.0.

    `steps` are the scores of a response's steps, NaN where missing, from a program that scores
    steps; it has no `value`.
    """

    value: float | None
    status: VerdictStatus = "ok"
    detail: str = ""
    steps: tuple[float, ...] = ()


@dataclass(frozen=True)
class SampleBlock:
    """Columns of N samples, keyed by sample id; what lies in the object store.

    `tokens` columns are flat [T], cut by `lengths` [N]; `scalars` columns are [N].
    Extra trailing dimensions are allowed, e.g. top-k ids [T, K].

        SampleBlock(("a@0#0", "a@0#1"), lengths=[3, 2],
                    tokens={"token_ids": [5, 6, 7, 5, 8]}, scalars={"reward": [1.0, 0.0]})
    """

    sample_ids: tuple[str, ...]
    lengths: Array  # int64 [N]
    tokens: Mapping[str, Array]
    scalars: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        for name, column in self.tokens.items():
            if len(column) != total:
                raise ValueError(f"column {name!r} has {len(column)} rows, {total} tokens expected")
        for name, column in self.scalars.items():
            if len(column) != len(self.sample_ids):
                raise ValueError(
                    f"column {name!r} has {len(column)} rows, {len(self.sample_ids)} samples"
                )
        if len(set(self.sample_ids)) != len(self.sample_ids):
            raise ValueError("a sample id stands twice in one block")

    def rows(self) -> Iterable[tuple[str, dict[str, Array]]]:
        """Yields (sample id, {column: [L] or scalar}) for each sample, in order."""
        ends = np.cumsum(self.lengths)
        for row, (name, end) in enumerate(zip(self.sample_ids, ends, strict=True)):
            span = slice(int(end - self.lengths[row]), int(end))
            columns = {key: value[span] for key, value in self.tokens.items()}
            yield name, columns | {key: value[row] for key, value in self.scalars.items()}


@dataclass(frozen=True)
class StoredBlock:
    """A block in the object store and whose rows it holds, so that a rank fetches only its own."""

    ref: BlockRef
    sample_ids: tuple[str, ...]


@dataclass(frozen=True)
class GroupHandle:
    """What the driver knows of one scored group: small scalars and a reference, no tokens.

    Lists are [G] in rollout order; a reward that is missing is NaN.
    `failure` says why the group can't be trained (then `block` may be None); else it is "".
    `step_rewards` are the scores of each rollout's steps, NaN where missing; () without a prm.
    `part_rewards` are the values of each part of the reward, NaN where missing.
    `teacher` is the name of the teacher that scores the group; "" without distillation.
    """

    prompt_key: str
    sample_ids: tuple[str, ...]
    block: BlockRef | None
    rewards: tuple[float, ...]
    accuracies: tuple[float, ...]
    lengths: tuple[int, ...]  # prompt and response tokens
    loss_tokens: tuple[int, ...]  # tokens with loss_mask 1
    finish_reasons: tuple[FinishReason, ...]
    oldest_version: int
    verdict_counts: Mapping[str, int]  # VerdictStatus -> number of reward calls
    generate_s: float
    reward_s: float
    failure: str = ""
    step_rewards: tuple[tuple[float, ...], ...] = ()
    part_rewards: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # part -> [G]
    teacher: str = ""


@dataclass(frozen=True)
class BatchScalars:
    """The scalars of every sample of the batch, known to all ranks. Lists are [N].

    With a prm: `step_rewards` are the scores of each sample's steps and `step_advantages` what a
    step adds to the advantage of its tokens, made from the whole batch; NaN where missing.
    """

    sample_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    loss_tokens: tuple[int, ...]
    step_rewards: tuple[tuple[float, ...], ...] = ()
    step_advantages: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class BatchView:
    """One batch as the driver hands it to a role: references, and who takes which rows.

    `minibatches[m][d]` are the sample ids that data-parallel rank d takes in optimizer step m.
    `blocks` hold every column needed; each rank fetches those that hold rows of it, and joins by
    sample id.
    `prompt_length` [N] and the per-token columns token_ids, loss_mask, rollout_logprobs and
    policy_versions come with the rollouts, and step_index with a prm; old_logprobs and
    ref_logprobs are added by passes, and those of distillation/base.py. With a hint for the teacher
    `teacher_prompt_ids` [N, P] holds the tokens it reads before the response.
    """

    step: int
    blocks: tuple[StoredBlock, ...]
    scalars: BatchScalars
    minibatches: tuple[tuple[tuple[str, ...], ...], ...]


@dataclass(frozen=True)
class PassResult:
    """What one rank returns from a pass: a block of new columns (None on ranks that own none)."""

    block: StoredBlock | None
    metrics: Mapping[str, Any]
    seconds: float
