"""Teachers, judges and the rarer ways to publish weights, together in two whole runs.

`routed`: two teachers by a field of the prompts, the policy judges its own steps, and engines
finish their answers before they take new weights. `held`: a teacher in the actor's ranks, a judge
with a model of its own, and weights that are published every second step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from shared_runs import AT_ONCE
from whole_run import GRPO, WholeRun, teacher

from rlpost.models.tiny import TinyModel, TinyModelConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DOMAINS = ("plus", "minus")
JUDGE = (
    *GRPO,
    "group_size=2",
    "train_batch_size=8",
    "prm=judge",
    "prm.chat=false",
    "prm.template='{prompt}{before}{step}='",
    "prm.verdict_pattern='[12]'",
    "prm.good_verdict='1'",
    "prm.bad_verdict='2'",
    "prm.max_verdict_tokens=8",
    "prm.steps.separator=[4,5]",  # two characters of many: a step has some ten tokens
)
ROUTED = (
    *JUDGE,
    *(
        part
        for name, seed in zip(DOMAINS, (2, 3), strict=True)
        for part in teacher(name, seed=seed)
    ),
    "num_steps=5",
    "rollout.max_response_tokens=64",
    "loop=fully_async",
    "weight_sync.pause=drain",
    "data=file",
    "data.metadata_keys=[domain]",
    "distillation=sampled",
    "distillation.route_by=domain",
)
HELD = (
    *JUDGE,
    *teacher("big", seed=2),
    "num_steps=5",
    "rollout.max_response_tokens=16",
    "loop=async",
    "loop.update_weights_interval=2",
    "distillation=full",
    "+model@prm.model=tiny_init",
    "prm.model.model_seed=3",
    "+engine@prm.engine=vllm",
    "prm.num_votes=2",
    "prm.rule=mean",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WholeRun]]:
    folder = tmp_path_factory.mktemp("roles")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(row(number) for number in range(200)))
    made = {
        "routed": WholeRun(folder / "routed", *ROUTED, f"data.path={rows}"),
        "held": WholeRun(folder / "held", *HELD),
    }
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(WholeRun.finished, made.values()))
        yield made
    finally:
        for run in made.values():
            run.end()


def row(number: int) -> str:
    domain = DOMAINS[number % 2]
    prompt = f"{number}{'+-'[number % 2]}1="
    return json.dumps({"prompt": prompt, "answer": "1", "domain": domain}) + "\n"


def trained(run: WholeRun, step: int | None = None) -> list[dict[str, Any]]:
    tables = [pq.read_table(path) for path in sorted((run.run_dir / "samples").iterdir())]
    rows = [row for table in tables for row in table.to_pylist()]
    return [row for row in rows if row["reason"] == "trained" and step in (None, row["step"])]


def response(row: dict[str, Any], column: str) -> list[Any]:
    return [value for value, mask in zip(row[column], row["loss_mask"], strict=True) if mask]


# -- two teachers, routed ------------------------------------------------------------------------


def model_of(run: WholeRun, *section: str) -> Any:
    """The random model of a section of the run's settings, as transformers reads it."""
    from transformers import AutoModelForCausalLM

    settings = yaml.safe_load((run.run_dir / "config.yaml").read_text())
    for key in section:
        settings = settings[key]
    del settings["_target_"]
    folder = TinyModel(TinyModelConfig(**settings)).prepare(run.output_dir / "models")
    return AutoModelForCausalLM.from_pretrained(folder)


def distributions(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """[R, V] log-probs at the tokens of the response."""
    ids = torch.tensor(row["token_ids"])
    with torch.no_grad():
        scores: torch.Tensor = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return scores[row["prompt_length"] - 1 :]


def logprobs(model: Any, row: dict[str, Any]) -> np.ndarray:
    """[R] of the response's tokens."""
    ids = torch.tensor(row["token_ids"][row["prompt_length"] :])
    return distributions(model, row).gather(-1, ids[:, None])[:, 0].numpy()


def test_each_prompt_is_scored_by_the_teacher_of_its_domain(runs: dict[str, WholeRun]) -> None:
    rows = trained(runs["routed"])
    for name, sign in zip(DOMAINS, "+-", strict=True):
        model = model_of(runs["routed"], "teachers", name, "model")
        for row in rows:
            close = np.allclose(logprobs(model, row), response(row, "teacher_logprobs"), atol=1e-3)
            assert close == (sign in row["prompt"]), row["prompt"]


def test_the_sampled_gain_is_part_of_the_advantage(runs: dict[str, WholeRun]) -> None:
    """What is left is the same for all tokens of a step."""
    for row in trained(runs["routed"]):
        gain = np.subtract(response(row, "teacher_logprobs"), response(row, "old_logprobs"))
        left = np.subtract(response(row, "advantages"), gain)
        steps = np.array(response(row, "step_index"))
        for step in set(steps.tolist()):
            assert np.ptp(left[steps == step]) < 1e-4


# -- judges --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "values"), [("routed", {0, 1}), ("held", {0, 0.5, 1})])
def test_votes_settle_the_score_of_a_step(
    name: str, values: set[float], runs: dict[str, WholeRun]
) -> None:
    run = runs[name]
    scores = [score for row in trained(run) for score in row["step_scores"]]
    known = {score for score in scores if not math.isnan(score)}
    assert {0, 1} <= known <= values
    missing = sum(math.isnan(score) for score in scores)
    assert 0 < missing == sum(run.column("prm/missing"))
    assert (run.run_dir / "logs" / "prm-0.log").exists() == (name == "held")


# -- weights -------------------------------------------------------------------------------------


def test_drained_engines_change_no_answer_under_way(runs: dict[str, WholeRun]) -> None:
    run = runs["routed"]
    rows = trained(run)
    assert all(len(set(response(row, "policy_versions"))) == 1 for row in rows)
    assert max(len(response(row, "token_ids")) for row in rows) == 64
    assert run.column("policy/version") == [1, 2, 3, 4, 5]
    assert 0 < max(run.column("policy/staleness/max")) <= 2


def test_weights_may_be_published_every_second_step(runs: dict[str, WholeRun]) -> None:
    """And at the end. A batch is begun under what was published before the one before trained."""
    run = runs["held"]
    assert run.column("policy/version") == [0, 1, 1, 2, 3]
    assert run.column("policy/staleness/max") == [0, 0, 1, 0, 1]


def test_the_teacher_in_the_actors_ranks_is_compared_over_the_whole_vocabulary(
    runs: dict[str, WholeRun],
) -> None:
    """Sum of p log(p/q) at each answered token, p being the student before its first update."""
    run = runs["held"]
    student, big = model_of(run, "model"), model_of(run, "teachers", "big", "model")
    found = []
    for row in trained(run, step=1):
        log_p, log_q = (distributions(model, row) for model in (student, big))
        found.append((log_p.exp() * (log_p - log_q)).sum(-1))
    divergence = run.column("distill/divergence/mean")
    assert divergence[0] == pytest.approx(torch.cat(found).mean().item(), rel=1e-3)
    assert not list((run.run_dir / "logs").glob("teacher*"))


def test_nothing_is_left(runs: dict[str, WholeRun]) -> None:
    for run in runs.values():
        run.nothing_is_left()
