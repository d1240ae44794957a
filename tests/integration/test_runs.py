"""Whole runs through `launch.py`: what they leave, that they repeat, that the loops agree."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from shared_runs import Runs
from whole_run import WholeRun

from rlpost.checkpoint import verify_manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EQUAL = ["colocated", "async without lookahead", "fully async without staleness"]
STEPS = list(range(1, 11))
AFTER = [6, 7, 8, 9, 10]  # of the run resumed from step 5
ORDER = ["sync", *EQUAL, "resumed", "dynamic sampling", "async", "fully async"]
METRICS = [
    "train/loss",
    "train/policy_loss",
    "train/grad_norm",
    "train/lr",
    "train/entropy",
    "train/approx_kl",
    "train/clip_fraction/high",
    "train/clip_fraction/low",
    "train/ratio/max",
    "train/skipped_steps",
    "train/mismatch/max",
    "train/mismatch/mean_abs",
    "train/mismatch/k3",
    "rollout/reward/mean",
    "rollout/reward/std",
    "rollout/reward/missing",
    "rollout/accuracy/mean",
    "rollout/length/mean",
    "rollout/length/max",
    "rollout/truncated/ratio",
    "rollout/groups/trained",
    "rollout/groups/dropped",
    "rollout/verdict/ok",
    "data/ledger/drawn",
    "data/ledger/trained",
    "data/ledger/in_flight",
    "policy/version",
    "policy/staleness/max",
    "time/step_s",
    "time/generate_s",
    "time/reward_s",
    "time/logprobs_s",
    "time/train_s",
    "time/weight_sync_s",
    "perf/generated_tokens",
    "perf/generated_tokens_per_s",
    "perf/trained_tokens_per_s",
]
TOKEN_COLUMNS = ["token_ids", "loss_mask", "rollout_logprobs", "old_logprobs", "policy_versions"]
# Not timed and not counted: what must be the same number in a second run.
REPEATED = ["rollout/reward/mean", "train/loss", "train/grad_norm", "rollout/length/mean"]


@pytest.fixture(scope="module", autouse=True)
def all_runs(runs: Runs) -> None:
    for name in ORDER:
        runs.start(name)


@pytest.fixture
def sync(runs: Runs) -> WholeRun:
    return runs.get("sync")


def samples(run: WholeRun, step: int) -> list[dict[str, Any]]:
    table = pq.read_table(run.run_dir / "samples" / f"step_{step:06d}.parquet")
    return table.to_pylist()  # type: ignore[no-any-return]


def weights(run: WholeRun, step: int) -> bytes:
    return (run.checkpoint(step) / "hf" / "model.safetensors").read_bytes()


def same_numbers(one: WholeRun, other: WholeRun, steps: list[int]) -> bool:
    left, right = one.steps(), other.steps()
    return all(left[step][name] == right[step][name] for step in steps for name in REPEATED)


# -- one run: what it leaves ---------------------------------------------------------------------


def test_every_step_has_its_metrics(sync: WholeRun) -> None:
    steps = sync.steps()
    assert sorted(steps) == STEPS
    for row in steps.values():
        assert set(METRICS) <= row.keys()
        assert row["train/mismatch/max"] <= 1e-3
        parts = ["generate", "reward", "logprobs", "train", "weight_sync"]
        assert sum(row[f"time/{part}_s"] for part in parts) <= row["time/step_s"] + 0.01
    assert [row["policy/version"] for row in steps.values()] == STEPS
    assert [row["policy/staleness/max"] for row in steps.values()] == [0] * 10


def test_the_policy_learns_from_the_reward(sync: WholeRun) -> None:
    assert max(sync.column("rollout/reward/std")) > 0
    assert weights(sync, 5) != weights(sync, 10)


def test_evals_run_before_training_and_at_the_end(sync: WholeRun) -> None:
    evals = [row["step"] for row in sync.metrics() if "eval/chain_sum/accuracy" in row]
    assert evals == [0, 10]


def test_samples_show_what_was_trained(sync: WholeRun) -> None:
    step = sync.steps()[2]
    rows = samples(sync, 2)
    assert Counter(row["reason"] for row in rows) == {"trained": 16}
    rewards = [row["reward"] for row in rows]
    assert sum(rewards) / 16 == pytest.approx(step["rollout/reward/mean"])
    for row in rows:
        assert {len(row[name]) for name in TOKEN_COLUMNS} == {len(row["token_ids"])}
        assert row["reward/own"] == row["reward"] and row["verdict/own"] == "ok"
        assert {v for v, m in zip(row["policy_versions"], row["loss_mask"], strict=True) if m} == {
            1
        }
    groups: dict[str, list[float]] = {}
    for row in rows:
        (advantage,) = {a for a, m in zip(row["advantages"], row["loss_mask"], strict=True) if m}
        groups.setdefault(row["prompt_key"], []).append(advantage)
    assert all(abs(sum(group)) < 1e-5 for group in groups.values())
    assert any(any(group) for group in groups.values())


def test_every_prompt_is_accounted_for(runs: Runs) -> None:
    for name in ORDER:
        for row in runs.get(name).steps().values():
            ends = ["trained", "filtered", "evicted", "failed", "in_flight"]
            parts = [row[f"data/ledger/{state}"] for state in ends]
            assert row["data/ledger/drawn"] == sum(parts)


def test_a_checkpoint_is_complete_and_its_model_opens_elsewhere(sync: WholeRun) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    verify_manifest(sync.checkpoint(10))
    listed = json.loads((sync.checkpoint(10) / "manifest.json").read_text())["files"]
    assert {Path(name).parts[0] for name in listed} == {"actor", "hf", "state.json"}
    model = AutoModelForCausalLM.from_pretrained(sync.checkpoint(10) / "hf")
    tokens = AutoTokenizer.from_pretrained(sync.checkpoint(10) / "hf")("1+2=", return_tensors="pt")
    assert model(tokens["input_ids"]).logits.isfinite().all()


def test_the_timeline_and_the_settings_lie_beside_the_metrics(sync: WholeRun) -> None:
    lines = (sync.run_dir / "events.jsonl").read_text().splitlines()
    seen = Counter(json.loads(line)["name"] for line in lines)
    assert seen["step"] == seen["train"] == 10 and seen["save"] == 2 and seen["eval"] == 2
    assert json.loads((sync.run_dir / "timeline.json").read_text())["traceEvents"]
    settings = yaml.safe_load((sync.run_dir / "config.yaml").read_text())
    assert settings["trainer"]["optimizer"]["lr"] == 0.003
    assert "prompts per step" in (sync.run_dir / "plan.txt").read_text()
    assert json.loads((sync.run_dir / "plan.json").read_text())["num_steps"] == 10


def test_ranks_hold_what_was_planned(sync: WholeRun) -> None:
    first, second, *_ = sync.steps().values()
    held = first["memory/actor/measured_held_bytes"]
    assert held == pytest.approx(first["memory/actor/planned_held_bytes"], rel=0.1)
    for role in ("actor", "engine"):  # estimates of whole processes
        planned = first[f"memory/{role}/planned_bytes"]
        assert planned / 2 < first[f"memory/{role}/measured_bytes"] < planned * 2
    assert not any(name.startswith("memory/") for name in second)
    assert "memory, measured / planned:  actor" in sync.out


def test_nothing_is_left_running(runs: Runs) -> None:
    for name in ORDER:
        runs.get(name).nothing_is_left()


def test_mlflow_has_the_run_and_a_resumed_run_goes_on_in_it(runs: Runs) -> None:
    sync, resumed = runs.get("sync"), runs.get("resumed")
    (found,) = resumed.mlflow_runs()
    assert found.info.status == "FINISHED"
    assert found.data.params["trainer.optimizer.lr"] == "0.003"
    client = sync.mlflow_client()
    history = client.get_metric_history(found.info.run_id, "rollout/reward/mean")
    assert [point.step for point in history] == [*STEPS, *AFTER]
    artifacts = {item.path for item in client.list_artifacts(found.info.run_id)}
    assert {"config.yaml", "plan.txt", "plan.json"} <= artifacts


# -- runs that must agree ------------------------------------------------------------------------


@pytest.mark.parametrize("name", EQUAL)
def test_loops_without_staleness_give_the_same_policy(name: str, runs: Runs) -> None:
    """It also shows that a run repeats: each is a process tree of its own."""
    sync, other = runs.get("sync"), runs.get(name)
    assert same_numbers(sync, other, STEPS)
    assert weights(sync, 10) == weights(other, 10)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(runs: Runs) -> None:
    sync, resumed = runs.get("sync"), runs.get("resumed")
    assert [row["step"] for row in resumed.metrics()] == AFTER  # no eval before training
    assert same_numbers(sync, resumed, AFTER)
    assert resumed.column("policy/version") == AFTER
    assert weights(sync, 10) == weights(resumed, 10)
    keys = [row["sample_id"] for row in samples(resumed, 6)]
    assert keys == [row["sample_id"] for row in samples(sync, 6)]


# -- other forms ---------------------------------------------------------------------------------


def test_dynamic_sampling_refills_exactly(runs: Runs) -> None:
    run = runs.get("dynamic sampling")
    assert run.column("rollout/groups/trained") == [4, 4, 4]
    assert sum(run.column("rollout/groups/dropped")) > 0
    for step, row in run.steps().items():
        reasons = Counter(sample["reason"] for sample in samples(run, step))
        assert reasons["trained"] == 16
        dropped = sum(count for reason, count in reasons.items() if reason != "trained")
        assert dropped == 4 * row["rollout/groups/dropped"]
        assert row["rollout/reward/std"] > 0


def test_the_trainer_scores_answers_at_the_temperature_they_were_sampled_at(runs: Runs) -> None:
    assert max(runs.get("dynamic sampling").column("train/mismatch/max")) <= 1e-3


def test_a_reference_holds_the_policy(runs: Runs) -> None:
    run = runs.get("dynamic sampling")
    assert (run.run_dir / "logs" / "reference-0.log").exists()
    kl = run.column("train/kl")
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-6
    assert all(
        len(row["ref_logprobs"]) == len(row["token_ids"])
        for row in samples(run, 1)
        if row["reason"] == "trained"
    )


@pytest.mark.parametrize(("name", "bound"), [("async", 1), ("fully async", 2)])
def test_asynchronous_loops_train_within_their_bound(name: str, bound: int, runs: Runs) -> None:
    run = runs.get(name)
    assert run.column("policy/version") == [1, 2, 3, 4]
    assert run.column("rollout/groups/trained") == [4] * 4
    staleness = run.column("policy/staleness/max")
    assert max(staleness) <= bound and max(staleness) > 0


def test_two_engines_serve_one_run(runs: Runs) -> None:
    logs = runs.get("async").run_dir / "logs"
    assert {"engine-0.log", "engine-1.log"} <= {path.name for path in logs.iterdir()}
