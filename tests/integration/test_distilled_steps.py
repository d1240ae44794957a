"""A distilled optimizer step must not depend on how student and teacher are spread over ranks.

Real Megatron on gloo. The teacher is a deeper model of random weights; hints are random prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_models
import numpy as np
import pytest
import torch
import yaml
from trainer_ranks import CONF, Ranks, grpo, rollouts, trainer_config, view_of

from rlpost.distillation.full import Full
from rlpost.distillation.sampled import Sampled
from rlpost.distillation.topk import TopK
from rlpost.errors import TrainerError
from rlpost.metrics import merge, results
from rlpost.types import BatchView, SampleBlock, StoredBlock

pytestmark = pytest.mark.slow

VOCAB = 101
ROWS = list(range(12))
ON_ONE: Any = [[ROWS[:7]], [ROWS[7:]]]
ON_TWO: Any = [[ROWS[:7:2], ROWS[1:7:2]], [ROWS[7:9], ROWS[9:]]]
LAYOUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "one": ({}, ON_ONE),
    "dp2": ({"dp": 2}, ON_TWO),
    "tp2": ({"tp": 2}, ON_ONE),
    "pp2": ({"pp": 2}, ON_ONE),
}
HINT = {"context": "hint", "hint_template": "{answer}{prompt}"}


def mode(name: str, **changes: Any) -> Any:
    """conf/distillation/<name>.yaml with changes."""
    values = yaml.safe_load((CONF / f"distillation/{name}.yaml").read_text())
    del values["_target_"]
    target = {"sampled": Sampled, "topk": TopK, "full": Full}[name]
    return target(target.Config(**values | {"teacher_temperature": 0.8} | changes))


def with_hints(block: SampleBlock) -> SampleBlock:
    """Each group's teacher reads a prompt of its own length."""
    numbers = np.random.default_rng(7)
    prompts = {
        group: numbers.integers(0, VOCAB, 3 + 2 * int(group.split("@")[0]))
        for group in dict.fromkeys(name.split("#")[0] for name in block.sample_ids)
    }
    column = np.empty(len(block.sample_ids), object)
    for row, name in enumerate(block.sample_ids):
        column[row] = prompts[name.split("#")[0]]
    first = np.cumsum(block.lengths) - block.lengths
    starts = [int(np.argmax(row["loss_mask"])) for _, row in block.rows()]
    assert len(starts) == len(first)
    scalars = {"prompt_length": np.array(starts), "teacher_prompt_ids": column}
    return dataclasses.replace(block, scalars={**block.scalars, **scalars})


BLOCK = with_hints(rollouts(seed=0))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    student = megatron_models.write(folder / "student", "qwen3")
    teacher = megatron_models.write(folder / "teacher", "llama", num_hidden_layers=4)
    return student, teacher


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, Ranks]]:
    found = {1: Ranks(1), 2: Ranks(2)}
    yield found
    for ranks in found.values():
        ranks.close()


def started(worlds: Any, layout: str, model: Path, **arguments: Any) -> Ranks:
    changes, _ = LAYOUTS[layout]
    ranks: Ranks = worlds[2 if changes else 1]
    ranks.start(trainer_config(**changes), model=model, **arguments)
    return ranks


def blocks_of(ranks: Ranks, method: str, view: BatchView, column: str) -> list[StoredBlock]:
    return [part.block for part in ranks.call(method, view, column) if part.block is not None]


def asked(
    worlds: Any, models: tuple[Path, Path], distillation: Any, student: str, teacher: str
) -> list[StoredBlock]:
    """The blocks of the passes: the student's on its layout, the teacher's on another."""
    ranks = started(
        worlds,
        student,
        models[0],
        algorithm=grpo(kl_coef=0.0),
        distillation=distillation,
        teacher_path=str(models[1]),
    )
    view = view_of(BLOCK, LAYOUTS[student][1])
    blocks = blocks_of(ranks, "compute_logprobs", view, "old_logprobs")
    if distillation.in_actor:
        return blocks
    temperature = distillation.config.teacher_temperature
    ranks = started(
        worlds,
        teacher,
        models[1],
        algorithm=None,
        distillation=distillation,
        temperature=temperature,
    )
    view = view_of(BLOCK, LAYOUTS[teacher][1], blocks)
    return blocks + blocks_of(ranks, "compute_teacher", view, "teacher_logprobs")


def trained(
    worlds: Any,
    models: tuple[Path, Path],
    distillation: Any,
    student: str = "one",
    teacher: str = "one",
) -> dict[str, float]:
    """Metrics of two optimizer steps; the second one depends on the first one's gradient."""
    blocks = asked(worlds, models, distillation, student, teacher)
    ranks = started(
        worlds,
        student,
        models[0],
        algorithm=grpo(kl_coef=0.0),
        distillation=distillation,
        teacher_path=str(models[1]),
    )
    view = view_of(BLOCK, LAYOUTS[student][1], blocks)
    return results(merge(part.metrics for part in ranks.call("train", view)))


@pytest.fixture(scope="module")
def alone(worlds: Any, models: Any) -> dict[str, float]:
    return trained(worlds, models, mode("topk"))


PAIRS = [("dp2", "one"), ("one", "dp2"), ("dp2", "dp2"), ("tp2", "tp2"), ("pp2", "pp2")]


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_sizes_of_student_and_teacher_do_not_change_the_result(
    worlds: Any, models: Any, alone: Any, student: str, teacher: str
) -> None:
    found = trained(worlds, models, mode("topk"), student, teacher)
    assert found == pytest.approx(alone, rel=1e-5, abs=1e-5)
    assert alone["distill/loss"] > 0.1


@pytest.mark.parametrize("name", ["sampled", "topk", "full"])
@pytest.mark.parametrize("layout", ["tp2", "dp2", "pp2"])
def test_every_mode_with_a_hint_gives_the_same_on_all_layouts(
    worlds: Any, models: Any, name: str, layout: str
) -> None:
    changes = {"subset": "union"} if name == "topk" else {}
    distillation = mode(name, **HINT, **changes)
    expected = trained(worlds, models, distillation)
    found = trained(worlds, models, distillation, layout, layout)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"subset": "student", "tail": "bucket"},
        {"subset": "teacher", "tail": "drop", "divergence": "forward_kl"},
        {"subset": "union", "tail": "renormalize", "divergence": "jsd", "beta": 0.4},
    ],
)
def test_the_whole_vocabulary_as_top_k_equals_full(
    worlds: Any, models: Any, changes: dict[str, Any]
) -> None:
    how = {key: changes[key] for key in ("divergence", "beta") if key in changes}
    topk = trained(worlds, models, mode("topk", k=VOCAB, policy_coef=0.0, **changes))
    full = trained(worlds, models, mode("full", policy_coef=0.0, **how))
    assert full["distill/loss"] > 0.1
    for key in ("distill/loss", "train/loss", "train/grad_norm"):
        assert topk[key] == pytest.approx(full[key], rel=1e-5, abs=1e-6), key


def teacher_by_transformers(prompt_ids: Any, response_ids: Any) -> torch.Tensor:
    """[response, V] log-probs at temperature 0.8 after a prompt of ids."""
    network = megatron_models.build("llama", num_hidden_layers=4)
    ids = torch.tensor([*prompt_ids, *response_ids])
    with torch.no_grad():
        logprobs = (network(ids[None]).logits[0] / 0.8).log_softmax(-1)
    return logprobs[len(prompt_ids) - 1 : -1]


@pytest.mark.parametrize("context", ["same", "hint"])
@pytest.mark.parametrize("subset", ["student", "teacher", "union"])
def test_the_teachers_answer_equals_transformers_at_each_of_the_students_tokens(
    worlds: Any, models: Any, context: str, subset: str
) -> None:
    """Also at the first response token, which the last prompt token predicts."""
    distillation = mode("topk", subset=subset, k=5, **(HINT if context == "hint" else {}))
    blocks = asked(worlds, models, distillation, "one", "dp2")
    columns: dict[str, dict[str, Any]] = {}
    for block in blocks:
        for name, row in block.ref.rows():
            columns.setdefault(name, {}).update(row)
    for name, row in BLOCK.rows():
        found, start = columns[name], int(row["prompt_length"])
        same = row["token_ids"][:start]
        prompt = row["teacher_prompt_ids"] if context == "hint" else same
        expected = teacher_by_transformers(prompt, row["token_ids"][start:])
        for position in np.flatnonzero(row["loss_mask"]):
            full = expected[position - start]
            token = int(row["token_ids"][position])
            assert found["teacher_logprobs"][position] == pytest.approx(
                float(full[token]), abs=1e-4
            )
            ids = found["teacher_ids"][position]
            if subset != "teacher":
                assert (ids[:5] == found["student_ids"][position]).all()
            if subset != "student":
                assert set(full.topk(5).indices.tolist()) <= set(ids.tolist())
            present = ids[ids >= 0]
            assert len(set(present.tolist())) == len(present)
            np.testing.assert_allclose(
                found["teacher_top_logprobs"][position][ids >= 0], full[present], atol=1e-4
            )
        off = row["loss_mask"] == 0
        assert np.isnan(found["teacher_logprobs"][off]).all()


def test_columns_of_other_ids_or_other_responses_are_refused(worlds: Any, models: Any) -> None:
    distillation = mode("topk", policy_coef=0.0)
    blocks = asked(worlds, models, distillation, "one", "one")
    answers = blocks[-1].ref
    ranks = started(
        worlds, "one", models[0], algorithm=grpo(kl_coef=0.0), distillation=distillation
    )
    mixed = {**answers.tokens, "teacher_ids": answers.tokens["teacher_ids"][:, ::-1]}
    wrong = StoredBlock(dataclasses.replace(answers, tokens=mixed), answers.sample_ids)
    with pytest.raises(TrainerError, match="other token ids than the student's"):
        ranks.call("train", view_of(BLOCK, ON_ONE, [*blocks[:-1], wrong]))
    with pytest.raises(TrainerError, match="column 'teacher_logprobs' is missing for 12 of 12"):
        ranks.call("train", view_of(BLOCK, ON_ONE, blocks[:-1]))


def test_tokens_without_an_answer_are_neither_trained_nor_counted(worlds: Any, models: Any) -> None:
    """Two thirds of the samples have none: the loss is the mean over the others."""
    distillation = mode("topk", policy_coef=0.0)
    blocks = asked(worlds, models, distillation, "one", "one")
    answers = blocks[-1].ref
    kept = {name for row, name in enumerate(answers.sample_ids) if row % 3 == 0}
    tokens = {name: column.copy() for name, column in answers.tokens.items()}
    ends = np.cumsum(answers.lengths)
    for name, end, length in zip(answers.sample_ids, ends, answers.lengths, strict=True):
        if name not in kept:
            tokens["teacher_logprobs"][end - length : end] = np.nan
    partial = StoredBlock(dataclasses.replace(answers, tokens=tokens), answers.sample_ids)
    found = []
    rows = [row for row, name in enumerate(BLOCK.sample_ids) if name in kept]
    for view in (
        view_of(BLOCK, [[ROWS]], [*blocks[:-1], partial]),
        view_of(BLOCK, [[rows]], blocks),
    ):
        ranks = started(
            worlds,
            "one",
            models[0],
            algorithm=grpo(kl_coef=0.0, entropy_coef=0.0),
            distillation=distillation,
        )
        found.append(results(merge(part.metrics for part in ranks.call("train", view))))
    for key in ("distill/loss", "train/grad_norm", "distill/teacher_logprob/mean"):
        assert found[0][key] == pytest.approx(found[1][key], rel=1e-5), key
