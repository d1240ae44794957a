import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import (
    LENGTHS,
    NAMES,
    POLICY_GRADIENTS,
    REWARDS,
    build,
    loss_inputs,
    micro_batch,
    outcome_inputs,
    run,
    token_inputs,
)

KL = {"kl_coef": 0.3}
CORRECTIONS = {
    "none": {"correction": "none"},
    "tis": {"correction": "tis", "correction_max": 1.1},
    "mask": {"correction": "mask", "correction_min": 0.7, "correction_max": 1.3},
    "sequence_tis": {
        "correction": "sequence_tis",
        "correction_max": 1.1,
        "correction_sequence": "geometric",
    },
    "sequence_mask": {
        "correction": "sequence_mask",
        "correction_min": 0.5,
        "correction_max": 1.5,
        "correction_sequence": "product",
    },
}
SURROGATES = {
    "ppo_clip": {"policy_loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3},
    "dual": {"policy_loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.5},
    "gspo": {"policy_loss": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    "cispo": {"policy_loss": "cispo", "clip_low": 0.2, "clip_high": 0.3},
    "reinforce": {"policy_loss": "reinforce", "clip_low": None, "clip_high": None},
}


def clipped_loss(ratio, advantage, config):
    objective = torch.minimum(
        ratio * advantage,
        torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage,
    )
    if config.dual_clip is not None and advantage < 0:
        objective = torch.maximum(objective, config.dual_clip * advantage)
    return -objective


def surrogate(config, i, span, inputs):
    new, old, advantage = inputs.logprobs_M, inputs.old_logprobs_M, inputs.advantages_M[i]
    ratio = torch.exp(new[i] - old[i])
    if config.policy_loss == "reinforce":
        return -advantage * new[i]
    if config.policy_loss == "cispo":
        weight = torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high).detach()
        return -weight * advantage * new[i]
    if config.policy_loss == "gspo":
        mean = sum((new[t] - old[t]).detach() for t in span) / len(span)
        ratio = torch.exp(mean) * torch.exp(new[i] - new[i].detach())
    return clipped_loss(ratio, advantage, config)


def correction(config, i, span, inputs):
    if config.correction == "none":
        return 1.0
    logs = [float(inputs.old_logprobs_M[t] - inputs.rollout_logprobs_M[t]) for t in span]
    log = float(inputs.old_logprobs_M[i] - inputs.rollout_logprobs_M[i])
    if config.correction_sequence == "geometric":
        log = sum(logs) / len(logs)
    if config.correction_sequence == "product":
        log = sum(logs)
    weight = math.exp(log)
    if config.correction in ("tis", "sequence_tis"):
        return min(weight, config.correction_max)
    return float(config.correction_min <= weight <= config.correction_max)


def kl(config, i, inputs):
    d = inputs.logprobs_M[i] - inputs.ref_logprobs_M[i]
    value = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) + d - 1}[config.kl_estimator]
    if config.kl_unbiased:
        value = value * torch.exp(inputs.logprobs_M[i] - inputs.old_logprobs_M[i]).detach()
    return value


def plain_loss(config, inputs):
    """The formulas token by token, in Python."""
    total, start = torch.zeros((), dtype=torch.float64), 0
    for length in LENGTHS:
        span = range(start, start + length)
        for i in span:
            token = correction(config, i, span, inputs) * surrogate(config, i, span, inputs)
            if config.kl_placement == "loss":
                token = token + config.kl_coef * kl(config, i, inputs)
            token = token - config.entropy_coef * inputs.entropy_M[i]
            total = total + inputs.weights_M[i] * token
        start += length
    return total


@pytest.mark.parametrize("corrected", CORRECTIONS)
@pytest.mark.parametrize("shape", SURROGATES)
def test_loss_and_gradient_equal_the_plain_formula(shape, corrected):
    options = SURROGATES[shape] | CORRECTIONS[corrected]
    for kl_options in (
        {},
        KL | {"kl_estimator": "k2", "kl_unbiased": True},
        KL | {"kl_estimator": "k1", "entropy_coef": 0.2},
    ):
        algorithm = build("grpo", **options, **kl_options)
        _, inputs, loss, _ = run(algorithm)
        leaves = [inputs.logprobs_M, inputs.entropy_M]
        actual = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        plain = plain_loss(algorithm.config, inputs)
        expected = torch.autograd.grad(plain, leaves)
        torch.testing.assert_close(loss, plain)
        torch.testing.assert_close(actual, list(expected))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "aggregation",
    ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"],
)
def test_micro_batches_and_ranks_do_not_change_loss_or_gradient(name, aggregation):
    if name == "dr_grpo" and aggregation == "sequence_mean_token_mean":
        aggregation = "token_mean"
    algorithm = build(name, loss_aggregation=aggregation, norm_length=None)
    advantages, inputs, loss, metrics = run(algorithm)
    whole = inputs.logprobs_M.grad.clone()
    for split in ([[0, 1, 2], [3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[1, 4], [0, 5, 2], [3]]):
        leaves = loss_inputs(algorithm, advantages)
        parts = [algorithm.loss(micro_batch(leaves, rows)) for rows in split]
        total = sum(part for part, _ in parts)
        total.backward()
        torch.testing.assert_close(total, loss)
        torch.testing.assert_close(leaves.logprobs_M.grad, whole)
        merged = parts[0][1]
        for _, part in parts[1:]:
            merged = {key: merged[key].merge(part[key]) for key in merged}
        for key, metric in metrics.items():
            assert math.isclose(merged[key].result(), metric.result(), abs_tol=1e-9), key


def test_micro_batch_without_tokens_gives_a_zero_loss_that_can_be_differentiated():
    for name in NAMES:
        algorithm = build(name)
        inputs = loss_inputs(algorithm, torch.zeros(sum(LENGTHS)).double())
        loss, _ = algorithm.loss(micro_batch(inputs, []))
        loss.backward()
        assert loss.item() == 0.0


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_zero_advantage_gives_zero_gradient(name):
    algorithm = build(name, kl_coef=0.0)
    inputs = loss_inputs(algorithm, torch.zeros(sum(LENGTHS)).double())
    algorithm.loss(inputs)[0].backward()
    assert not inputs.logprobs_M.grad.any()


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_missing_reward_enters_no_statistic_and_gets_no_advantage(name):
    algorithm = build(name)
    rewards = [*REWARDS]
    rewards[2] = math.nan
    outcome = algorithm.outcome(outcome_inputs(rewards))
    assert outcome.isnan().tolist() == [False, False, True, False, False, False]
    advantages = algorithm.token_advantages(token_inputs(outcome))
    assert advantages.isfinite().all()
    assert not advantages[4:8].any()
    # The others get what they would get if the sample had never been drawn.
    others = [0, 1, 3, 4, 5]
    alone = algorithm.token_advantages(token_inputs(outcome, others))
    torch.testing.assert_close(torch.cat([advantages[:4], advantages[8:]]), alone)


def test_group_of_one_is_zero_or_raw():
    for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"):
        for singleton, expected in (("zero", 0.0), ("raw", 3.0)):
            outcome = build(name, singleton=singleton).outcome(outcome_inputs())
            assert outcome[5].item() == expected


def test_kl_in_the_reward_lowers_the_advantage_by_the_penalty_still_to_come():
    plain = build("grpo")
    penal = build("grpo", kl_coef=0.3, kl_placement="reward", kl_estimator="k1")
    outcome = plain.outcome(outcome_inputs())
    torch.testing.assert_close(penal.outcome(outcome_inputs()), outcome)  # statistics untouched
    inputs = token_inputs(outcome)
    difference = plain.token_advantages(inputs) - penal.token_advantages(inputs)
    gap = (inputs.old_logprobs_M - inputs.ref_logprobs_M).tolist()
    expected, start = [], 0
    for length in LENGTHS:
        expected += [0.3 * sum(gap[t : start + length]) for t in range(start, start + length)]
        start += length
    torch.testing.assert_close(difference, torch.tensor(expected, dtype=torch.float64))
    _, _, with_kl, metrics = run(penal)
    assert metrics["train/policy_loss"].value == with_kl.item()  # not in the loss as well


def test_reinforce_pp_equals_the_loop():
    algorithm = build("reinforce_pp", kl_coef=0.3, gamma=0.9)
    inputs = token_inputs(algorithm.outcome(outcome_inputs()))
    gap = (inputs.old_logprobs_M - inputs.ref_logprobs_M).tolist()
    returns, start = [], 0
    for reward, length in zip(REWARDS, LENGTHS, strict=True):
        following, own = 0.0, []
        for t in reversed(range(start, start + length)):
            following = -0.3 * gap[t] + (reward if not own else 0.0) + 0.9 * following
            own.append(following)
        returns += reversed(own)
        start += length
    mean = sum(returns) / len(returns)
    std = math.sqrt(sum((r - mean) ** 2 for r in returns) / len(returns))
    expected = [(r - mean) / (std + 1e-6) for r in returns]
    actual = algorithm.token_advantages(inputs)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_log_probs_that_no_option_asks_for_never_reach_the_loss():
    algorithm = build("grpo")
    _, inputs, loss, metrics = run(algorithm)
    unknown = torch.full_like(inputs.rollout_logprobs_M, math.nan)
    other = replace(inputs, rollout_logprobs_M=unknown, ref_logprobs_M=None)
    again, metrics_again = algorithm.loss(other)
    assert again.item() == loss.item()
    assert metrics_again == metrics


def test_missing_reference_is_an_error_that_names_the_pass():
    algorithm = build("grpo", kl_coef=0.1)
    inputs = loss_inputs(algorithm, torch.ones(sum(LENGTHS)).double())
    with pytest.raises(ValueError, match="ref_logprobs pass"):
        algorithm.loss(replace(inputs, ref_logprobs_M=None))


def test_sft_is_the_weighted_negative_log_likelihood():
    algorithm = build("sft")
    _, inputs, loss, metrics = run(algorithm, rewards=[math.nan] * len(LENGTHS))
    torch.testing.assert_close(loss, -inputs.logprobs_M.mean())
    torch.testing.assert_close(
        inputs.logprobs_M.grad, torch.full_like(inputs.logprobs_M, -1 / sum(LENGTHS))
    )
    assert math.isclose(metrics["train/perplexity"].result(), math.exp(loss.item()), rel_tol=1e-6)
    assert not algorithm.outcome(outcome_inputs([math.nan] * len(LENGTHS))).isnan().any()
