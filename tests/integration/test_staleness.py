"""The staleness bound in whole runs, with answers of 1 to 64 tokens and an engine that never waits.

A random model ends each answer at any token, so a group may take sixty times as long as another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from shared_runs import AT_ONCE
from whole_run import GRPO, WholeRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = range(1, 25)
UNEQUAL = ("group_size=2", "train_batch_size=8", "rollout.max_response_tokens=64")
ON_STALE = {0: "wait", 1: "drop", 4: "wait"}  # by bound


@dataclass(frozen=True)
class Trained:
    """One trained group: the step it was trained in, and its tokens' staleness then."""

    step: int
    prompt_key: str
    staleness: list[int]


class Bounded:
    """A finished run under a bound."""

    def __init__(self, run: WholeRun) -> None:
        self.steps = run.steps()
        self.rows = [row for step in STEPS for row in samples(run, step)]

    def counts(self) -> Counter[str]:
        """Groups by what became of them."""
        return Counter(reason for _, reason in {(r["prompt_key"], r["reason"]) for r in self.rows})

    def trained(self) -> list[Trained]:
        """The trainer's version is the number of updates before the step."""
        groups: dict[str, Trained] = {}
        for row in self.rows:
            if row["reason"] == "trained":
                key, step = row["prompt_key"], row["step"]
                group = groups.setdefault(key, Trained(step, key, []))
                marked = zip(row["policy_versions"], row["loss_mask"], strict=True)
                group.staleness.extend(step - 1 - version for version, mask in marked if mask)
        return list(groups.values())


def samples(run: WholeRun, step: int) -> list[dict[str, Any]]:
    path = run.run_dir / "samples" / f"step_{step:06d}.parquet"
    return pq.read_table(path).to_pylist()  # type: ignore[no-any-return]


def launched(folder: Path, bound: int) -> Bounded:
    run = WholeRun(
        folder / str(bound),
        *GRPO,
        *UNEQUAL,
        f"num_steps={len(STEPS)}",
        "loop=fully_async",
        f"loop.max_staleness={bound}",
        f"loop.on_stale={ON_STALE[bound]}",
    )
    try:
        return Bounded(run.finished())
    finally:
        run.end()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Bounded]]:
    folder = tmp_path_factory.mktemp("staleness")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        made = pool.map(lambda bound: launched(folder, bound), ON_STALE)
        yield dict(zip(ON_STALE, made, strict=True))


def test_lengths_are_very_unequal(runs: dict[int, Bounded]) -> None:
    lengths = [sum(row["loss_mask"]) for run in runs.values() for row in run.rows]
    assert min(lengths) < 8 and max(lengths) == 64


@pytest.mark.parametrize("bound", ON_STALE)
def test_no_token_is_older_than_the_bound(bound: int, runs: dict[int, Bounded]) -> None:
    run = runs[bound]
    found: dict[int, int] = {}
    for group in run.trained():
        assert min(group.staleness) >= 0
        found[group.step] = max(found.get(group.step, 0), *group.staleness)
    assert max(found.values()) <= bound
    assert max(found.values()) > 0 or bound == 0
    assert {step: row["policy/staleness/max"] for step, row in run.steps.items()} == found


@pytest.mark.parametrize("bound", ON_STALE)
def test_nothing_is_dropped_without_a_reason(bound: int, runs: dict[int, Bounded]) -> None:
    run = runs[bound]
    ends = ("trained", "filtered", "evicted", "failed", "in_flight")
    for row in run.steps.values():
        assert row["data/ledger/drawn"] == sum(row[f"data/ledger/{end}"] for end in ends)
    last = run.steps[STEPS[-1]]
    assert last["data/ledger/in_flight"] == 0
    counts = run.counts()
    assert counts["trained"] == 4 * len(STEPS)
    assert counts["too_stale"] == last["data/ledger/evicted"]
    assert counts.total() == len({row["prompt_key"] for row in run.rows})
    assert counts.total() == last["data/ledger/drawn"]


def test_what_comes_too_late_is_evicted_and_replaced(runs: dict[int, Bounded]) -> None:
    late = [row for row in runs[1].rows if row["reason"] == "too_stale"]
    assert late
    for row in late:
        versions = zip(row["policy_versions"], row["loss_mask"], strict=True)
        assert row["step"] - 1 - min(version for version, mask in versions if mask) > 1
    assert not runs[4].counts()["too_stale"], "wait evicts nothing"


def test_a_long_answer_does_not_hold_back_those_that_are_ready(runs: dict[int, Bounded]) -> None:
    """Without staleness batches are trained in the order of drawing; it is the same in all runs."""
    drawn = [group.prompt_key for group in sorted(runs[0].trained(), key=lambda g: g.step)]
    place = {key: index for index, key in enumerate(drawn)}
    overtaken = [
        group.prompt_key
        for group in runs[4].trained()
        if group.step - 1 > place.get(group.prompt_key, len(drawn)) // 4
    ]
    assert overtaken
