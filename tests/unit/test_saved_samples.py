"""Saved samples as groups to train on, and files that can't be."""

from __future__ import annotations

import asyncio

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpost.errors import DataError
from rlpost.rollout import saved
from rlpost.rollout.saved import SavedSamples

COLUMNS = {
    "token_ids": [5, 6, 7, 1],
    "loss_mask": [False, False, True, True],
    "rollout_logprobs": [float("nan"), float("nan"), -0.25, -1.5],
    "policy_versions": [-1, -1, 3, 3],
    "prompt_length": 2,
    "finish_reason": "stop",
    "truncated": False,
    "reward": 1.0,
    "accuracy": float("nan"),
    "prompt": "56",
    "response": "7",
    "answer": "7",
    "verdict/exact": "ok",
    "reward/exact": 1.0,
    "old_logprobs": [0.0] * 4,
    "teacher": "default",
}


class Tokenizer:
    def decode(self, token_ids):
        return "".join(map(str, token_ids))


@pytest.fixture(autouse=True)
def plain_parts(monkeypatch):
    monkeypatch.setattr(saved, "load_tokenizer", lambda path: Tokenizer())
    monkeypatch.setattr(saved.store, "put", lambda block: block)


def row(prompt, index, reason="trained", **changes):
    return {
        "prompt_key": prompt,
        "sample_id": f"{prompt}#{index}",
        "reason": reason,
        **COLUMNS,
        **changes,
    }


GOOD = [row(prompt, index) for prompt in ("a@0", "b@0") for index in (0, 1)]


def groups(folder, rows=GOOD, *, num_steps=1, teachers=(), prompts_per_step=2):
    path = folder / "samples" / "step_000001.parquet"
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        pq.write_table(pa.Table.from_pylist(rows), path)
    samples = SavedSamples(
        source=folder,
        model_path="model",
        prompts_per_step=prompts_per_step,
        group_size=2,
        teachers=teachers,
        run_dir=folder / "new",
    )

    async def read():
        await samples.start(num_steps)
        return await samples.groups(1)

    return asyncio.run(read())


def test_groups_come_back_as_they_were_trained_on(tmp_path):
    dropped = row("c@0", 0, "constant_reward")
    found = groups(tmp_path, [dropped, *GOOD], teachers=("default",))
    assert [group.prompt_key for group in found] == ["a@0", "b@0"]
    first = found[0]
    assert first.sample_ids == ("a@0#0", "a@0#1")
    assert (first.rewards, first.lengths, first.loss_tokens) == ((1.0, 1.0), (4, 4), (2, 2))
    assert (first.oldest_version, first.teacher) == (3, "default")
    assert first.verdict_counts == {"ok": 2}
    assert list(first.part_rewards.values()) == [(1.0, 1.0)]
    block = first.block
    assert block.tokens["token_ids"].tolist() == [5, 6, 7, 1] * 2
    assert block.tokens["rollout_logprobs"].dtype == np.float32
    assert "old_logprobs" not in block.tokens  # a pass computes it anew


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no .*step_000002\.parquet for the 2 steps"):
        groups(tmp_path, num_steps=2)


def test_a_damaged_or_foreign_file_is_named(tmp_path):
    folder = tmp_path / "samples"
    folder.mkdir()
    (folder / "step_000001.parquet").write_bytes(b"PAR1 half a file")
    with pytest.raises(DataError, match=r"step_000001\.parquet can't be read as samples"):
        groups(tmp_path)
    pq.write_table(pa.table({"text": ["x"]}), folder / "step_000001.parquet")
    with pytest.raises(
        DataError, match=r"step_000001\.parquet is no samples file.*lacks sample_id"
    ):
        groups(tmp_path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (GOOD[:2], r"holds 1 groups of \[2\] samples to train on, this run takes 2 groups of 2"),
        (GOOD[:3], r"holds 2 groups of \[1, 2\] samples"),
        ([row("a@0", 0, "constant_reward")], r"holds 0 groups of \[\] samples"),
        ([{**item, "prompt": "7+5="} for item in GOOD], "was written with another tokenizer"),
    ],
)
def test_a_file_that_does_not_fit_the_run_is_named(rows, said, tmp_path):
    with pytest.raises(DataError, match=r"step_000001\.parquet.*" + said):
        groups(tmp_path, rows)


def test_a_teacher_that_this_run_lacks_is_named(tmp_path):
    with pytest.raises(DataError, match=r"scored by teacher 'default'; this run has other"):
        groups(tmp_path, teachers=("other", "third"))
