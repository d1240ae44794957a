"""What a step earned on the advantages of its tokens, and labels at the ends of steps."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlpost.algorithms.step_classification import StepClassification, StepClassificationConfig
from rlpost.errors import DataError, TrainerError
from rlpost.prm import calibration
from rlpost.trainers.megatron.packing import pack
from rlpost.trainers.megatron.step_credit import STEP_INDEX, earned_steps, with_steps
from rlpost.types import BatchScalars

NAN = math.nan


def row(step_index):
    index = np.array(step_index, np.int32)
    return {"token_ids": np.arange(len(index)), "loss_mask": index >= 0, STEP_INDEX: index}


def packed(*rows):
    names = [f"s{number}" for number in range(len(rows))]
    return pack(names, [row(index) for index in rows], columns=(STEP_INDEX,), multiple=1)


def test_every_token_of_a_step_gets_what_its_step_earned_and_no_other():
    batches = [packed([-1, 0, 0, 1], [-1, 0, -1, 1, 1])]
    earned = {"s0": (2.0, NAN), "s1": (-1.0, 0.5)}
    outcome = [torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])]
    (made,) = with_steps(outcome, batches, earned)
    assert made.tolist() == [3.0, 3.0, 1.0, -1.0, 0.5, 0.5]


def test_steps_without_an_entry_are_an_error():
    with pytest.raises(TrainerError, match="'s0' has a trained token in step 1, but scores of 1"):
        with_steps([torch.zeros(2)], [packed([-1, 0, 1])], {"s0": (1.0,)})


def test_without_process_rewards_nothing_is_added():
    scalars = BatchScalars(("s0",), ("g",), (1.0,), (3,), (2,))
    assert earned_steps(scalars) == {}


def test_the_classifier_s_loss_is_cross_entropy_of_soft_labels():
    algorithm = StepClassification(StepClassificationConfig(1, 1))
    outputs = torch.tensor([[0.0, 2.0], [1.0, -1.0], [0.0, 0.0]], requires_grad=True)
    scores = torch.tensor([1.0, 0.0, 0.25])
    loss, metrics = algorithm.loss(outputs, scores, torch.full((3,), 1 / 6))
    p = torch.softmax(outputs, 1)[:, 1]
    plain = -(scores * p.log() + (1 - scores) * (1 - p).log()).sum() / 6
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    assert metrics["train/accuracy"].result() == 1.0


def test_calibration_error_against_a_plain_loop():
    numbers = np.random.default_rng(0)
    p = numbers.uniform(0, 1, 500)
    y = (numbers.uniform(0, 1, 500) < p**2).astype(float)
    error = 0.0
    for low in range(10):
        inside = [(a, b) for a, b in zip(p, y, strict=True) if low / 10 <= a < (low + 1) / 10]
        error += abs(sum(a for a, _ in inside) - sum(b for _, b in inside)) / 500
    halves = calibration.bin_sums(p[:200], y[:200]) + calibration.bin_sums(p[200:], y[200:])
    assert calibration.calibration_error(halves) == pytest.approx(error)
    perfect = calibration.bin_sums(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    assert calibration.calibration_error(perfect) == 0.0


def test_the_diagram_is_drawn_from_the_samples_of_a_run(tmp_path, capsys):
    (tmp_path / "samples").mkdir()
    table = pa.table(
        {
            "reason": ["trained", "no_reward"],
            "step_index": [[-1, 0, 0, 1], [0]],
            "step_scores": [[1.0, 0.0], [1.0]],
            "step_probability": pa.array([[NAN, NAN, 0.75, 0.25], None], pa.list_(pa.float32())),
        }
    )
    pq.write_table(table, tmp_path / "samples" / "step_000001.parquet")
    calibration.main([str(tmp_path)])
    assert "calibration error 0.25" in capsys.readouterr().out
    assert (tmp_path / "calibration.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_predictions_has_no_diagram(tmp_path):
    with pytest.raises(DataError, match="no step_probability"):
        calibration.read_predictions(tmp_path, last=1)
