"""Samples that a run has saved, as groups to train on. Stands in for the rollout worker."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpost.cluster import store
from rlpost.errors import DataError
from rlpost.rollout.blocks import PART, VERDICT, as_objects, make_handle
from rlpost.rollout.encoding import load_tokenizer
from rlpost.rollout.samples import samples_file, write_samples
from rlpost.types import BlockRef, GroupHandle, SampleBlock

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    from rlpost.lazy import LazyModule

    pa = LazyModule("pyarrow")
    pq = LazyModule("pyarrow.parquet")

Row = Mapping[str, Any]
TRAINABLE = ("trained", "admitted")  # reasons of rows that are trained on
# What a rollout brings; the columns of passes are computed anew.
TOKENS = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "rollout_logprobs": np.float32,
    "policy_versions": np.int32,
}
OPTIONAL_TOKENS = {"step_index": np.int32}
SCALARS = ("prompt_length", "finish_reason", "truncated")
TEXTS = ("prompt", "response", "answer")
NEEDED = ("sample_id", "prompt_key", "reason", "reward", "accuracy", *TOKENS, *SCALARS, *TEXTS)


class SavedSamples:
    """Reads samples/step_*.parquet of the run folder `source`."""

    def __init__(
        self,
        *,
        source: Path,
        model_path: str,
        prompts_per_step: int,
        group_size: int,
        teachers: Sequence[str],
        run_dir: Path,
    ) -> None:
        self._source = Path(source) / "samples"
        self._samples_dir = Path(run_dir) / "samples"
        self._model_path = model_path
        self._shape = (prompts_per_step, group_size)
        self._teachers = tuple(teachers)
        self._tokenizer: Any = None

    async def start(self, num_steps: int) -> None:
        """Raises DataError if a step's file is not there."""
        for step in range(1, num_steps + 1):
            self._require(samples_file(self._source, step), num_steps)
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self._model_path)

    async def groups(self, step: int) -> list[GroupHandle]:
        """The groups that the saved step has trained on (or could have). Raises DataError."""
        return await asyncio.to_thread(self._groups, samples_file(self._source, step))

    async def write_samples(
        self,
        step: int,
        entries: Sequence[tuple[GroupHandle, str]],
        blocks: Sequence[BlockRef] = (),
    ) -> Path:
        path = samples_file(self._samples_dir, step)
        await asyncio.to_thread(write_samples, path, step, list(entries), list(blocks))
        return path

    async def close(self) -> None:
        """Nothing runs beside this object."""

    def _require(self, path: Path, num_steps: int) -> None:
        if not path.is_file():
            there = len(list(self._source.glob("step_*.parquet")))
            raise DataError(
                f"debug.samples_from: there is no {path} for the {num_steps} steps of this run "
                f"(files found: {there}); name a run that has them, or lower num_steps"
            )

    def _groups(self, path: Path) -> list[GroupHandle]:
        by_prompt: dict[str, list[Row]] = {}
        for row in read_rows(path):
            if row["reason"] in TRAINABLE:
                by_prompt.setdefault(row["prompt_key"], []).append(row)
        self._check_shape(path, by_prompt)
        self._check_tokenizer(path, next(iter(by_prompt.values()))[0])
        return [self._group(path, key, rows) for key, rows in by_prompt.items()]

    def _check_shape(self, path: Path, by_prompt: Mapping[str, Sequence[Row]]) -> None:
        wanted, group_size = self._shape
        sizes = sorted({len(rows) for rows in by_prompt.values()})
        if len(by_prompt) != wanted or sizes != [group_size]:
            raise DataError(
                f"{path} holds {len(by_prompt)} groups of {sizes} samples to train on, this run "
                f"takes {wanted} groups of {group_size}; set group_size and train_batch_size to "
                "those of the run that wrote it"
            )

    def _check_tokenizer(self, path: Path, row: Row) -> None:
        prompt = self._tokenizer.decode(row["token_ids"][: row["prompt_length"]])
        if prompt != row["prompt"]:
            raise DataError(
                f"{path} was written with another tokenizer: its tokens read {prompt!r} with that "
                f"of {self._model_path}, and {row['prompt']!r} in the file; choose the model of "
                "the run that wrote it"
            )

    def _group(self, path: Path, prompt_key: str, rows: Sequence[Row]) -> GroupHandle:
        block, teacher = block_of(rows), self._teacher(path, rows[0])
        ref = store.put(block)
        return make_handle(prompt_key, block, ref, generate_s=0.0, reward_s=0.0, teacher=teacher)

    def _teacher(self, path: Path, row: Row) -> str:
        if not self._teachers:
            return ""
        name = row.get("teacher") or (self._teachers[0] if len(self._teachers) == 1 else "")
        if name not in self._teachers:
            raise DataError(
                f"{path}: {row['prompt_key']} was scored by teacher {name!r}; this run has "
                f"{', '.join(self._teachers)}"
            )
        return str(name)


def read_rows(path: Path) -> list[Row]:
    """Raises DataError for a file that is damaged or holds something else."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} can't be read as samples: {error}") from error
    missing = [name for name in NEEDED if name not in table.column_names]
    if missing:
        raise DataError(f"{path} is no samples file of a run: it lacks {', '.join(missing)}")
    rows: list[Row] = table.to_pylist()
    return rows


def block_of(rows: Sequence[Row]) -> SampleBlock:
    """The columns that the group had when it was generated."""
    kinds = {
        **TOKENS,
        **{name: kind for name, kind in OPTIONAL_TOKENS.items() if rows[0].get(name) is not None},
    }
    return SampleBlock(
        sample_ids=tuple(row["sample_id"] for row in rows),
        lengths=np.array([len(row["token_ids"]) for row in rows], np.int64),
        tokens={
            name: np.concatenate([np.array(row[name], kind) for row in rows])
            for name, kind in kinds.items()
        },
        scalars=scalars_of(rows),
    )


def scalars_of(rows: Sequence[Row]) -> dict[str, Any]:
    numbers = ("reward", "accuracy", *(name for name in rows[0] if name.startswith(PART)))
    others = (*SCALARS, *(name for name in rows[0] if name.startswith(VERDICT)))
    columns = {name: np.array([number(row[name]) for row in rows]) for name in numbers}
    columns |= {name: np.array([row[name] for row in rows]) for name in others}
    columns |= {name: np.array([row[name] for row in rows], object) for name in TEXTS}
    if rows[0].get("step_scores") is not None:
        columns["step_scores"] = as_objects([np.array(row["step_scores"]) for row in rows])
    if rows[0].get("teacher_prompt_ids") is not None:
        columns["teacher_prompt_ids"] = np.array(
            [row["teacher_prompt_ids"] for row in rows], np.int32
        )
    return columns


def number(value: float | None) -> float:
    return math.nan if value is None else value
