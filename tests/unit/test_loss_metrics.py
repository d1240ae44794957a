"""What is measured of a loss: clips, corrections, what was dropped."""

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import LENGTHS, build, loss_inputs, micro_batch


def test_token_that_is_not_finite_is_dropped_from_every_term_and_counted():
    algorithm = build("grpo", correction="tis", correction_max=2.0, kl_coef=0.3, entropy_coef=0.1)
    inputs = loss_inputs(algorithm, torch.ones(sum(LENGTHS)).double())
    bad = {"old_logprobs_M": 0, "rollout_logprobs_M": 5, "ref_logprobs_M": 9}
    columns = {name: getattr(inputs, name).clone() for name in bad}
    for name, token in bad.items():
        columns[name][token] = math.nan
    loss, metrics = algorithm.loss(replace(inputs, **columns))
    loss.backward()
    assert metrics["train/dropped_tokens"].value == 3
    assert metrics["train/kl"].count == sum(LENGTHS) - 3
    for leaf in (inputs.logprobs_M, inputs.entropy_M):
        zero = [t for t, value in enumerate(leaf.grad.tolist()) if value == 0.0]
        assert set(zero) >= {0, 5, 9}
        assert leaf.grad.isfinite().all()
    assert all(math.isfinite(metric.result()) for metric in metrics.values())


def test_clip_fractions_count_tokens_whose_gradient_a_bound_takes():
    algorithm = build("grpo", clip_low=0.2, clip_high=0.3, dual_clip=2.0)
    inputs = loss_inputs(algorithm, torch.ones(sum(LENGTHS)).double())
    inputs = micro_batch(inputs, [4])
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 2.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    inputs = replace(
        inputs, logprobs_M=inputs.old_logprobs_M + ratios.log(), advantages_M=advantages
    )
    _, metrics = algorithm.loss(inputs)
    fractions = {
        key.rpartition("/")[2]: metric.result() for key, metric in metrics.items() if "clip" in key
    }
    assert fractions == {"high": 0.2, "low": 0.2, "dual": 0.2}
    assert math.isclose(metrics["train/ratio/max"].result(), 2.5)
    expected = sum(r - 1 - math.log(r) for r in ratios.tolist()) / 5
    assert math.isclose(metrics["train/approx_kl"].result(), expected)


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"correction": "tis", "correction_max": 2.0}, 0.4),
        ({"correction": "mask", "correction_min": 0.5, "correction_max": 2.0}, 0.6),
    ],
)
def test_what_a_correction_truncates_or_masks_is_measured(options, share):
    """w = 4, 4, 0.25, 1, 1: two above the upper bound, one below the lower."""
    algorithm = build("grpo", **options)
    inputs = micro_batch(loss_inputs(algorithm, torch.ones(sum(LENGTHS)).double()), [4])
    log_w_M = torch.tensor([4.0, 4.0, 0.25, 1.0, 1.0], dtype=torch.float64).log()
    inputs = replace(inputs, rollout_logprobs_M=inputs.old_logprobs_M - log_w_M)
    _, metrics = algorithm.loss(inputs)
    assert metrics["train/correction/outside"].result() == share
    _, metrics = build("grpo").loss(inputs)
    assert "train/correction/outside" not in metrics
