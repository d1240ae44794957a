"""Every option reaches the loss or the advantages, and options that can't are refused."""

import itertools
import json
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
import yaml
from algorithm_cases import CONF, NAMES, build, run
from pydantic import ValidationError

MASK = {"correction": "mask", "correction_min": 0.8, "correction_max": 1.2}
SEQUENCE = {
    "correction": "sequence_tis",
    "correction_max": 1.05,
    "correction_sequence": "geometric",
}
KL = {"kl_coef": 0.3}
FEWER_CLIPS = {"clip_low": 0.05, "clip_high": 0.06}
REINFORCE = {"policy_loss": "reinforce", "clip_low": None, "clip_high": None}
NORM = {"loss_aggregation": "sequence_mean_token_sum_norm", "norm_length": 8}

# (algorithm, options, the option that is changed and what must change with it)
CASES = [
    ("grpo", {}, REINFORCE),
    ("grpo", {}, {"policy_loss": "gspo"}),
    ("grpo", {}, {"policy_loss": "cispo"}),
    ("grpo", {}, {"clip_low": 0.05}),
    ("grpo", {}, {"clip_high": 0.3}),
    ("grpo", {}, {"dual_clip": 1.2}),
    ("grpo", {"policy_loss": "gspo", **FEWER_CLIPS}, {"dual_clip": 1.01}),
    ("grpo", MASK, {"correction_min": 0.4}),
    ("grpo", MASK, {"correction_max": 2.0}),
    ("grpo", {}, MASK),
    ("grpo", {}, SEQUENCE),
    ("grpo", SEQUENCE, {"correction_sequence": "product"}),
    ("grpo", {}, KL),
    ("grpo", KL, {"kl_estimator": "k2"}),
    ("grpo", KL, {"kl_estimator": "k1"}),
    ("grpo", KL, {"kl_placement": "reward"}),
    ("grpo", KL, {"kl_unbiased": True}),
    ("grpo", {}, {"entropy_coef": 0.1}),
    ("grpo", {}, {"loss_aggregation": "sequence_mean_token_mean"}),
    ("grpo", {}, {"loss_aggregation": "sequence_mean_token_sum"}),
    ("grpo", NORM, {"norm_length": 9}),
    ("grpo", {}, {"normalize_std": False, "std": None}),
    ("grpo", {}, {"std": "population"}),
    ("grpo", {}, {"singleton": "raw"}),
    ("dr_grpo", {}, {"singleton": "raw"}),
    ("rloo", {}, {"singleton": "raw"}),
    ("reinforce_pp", {}, {"gamma": 0.9}),
    ("reinforce_pp", {}, {"kl_coef": 0.3}),
    ("reinforce_pp", {}, {"kl_placement": "loss"}),
    ("reinforce_pp", {}, {"group_baseline": True, "singleton": "zero"}),
    ("reinforce_pp_baseline", {}, {"singleton": "raw"}),
    ("ppo", {}, {"gamma": 0.9}),
    ("ppo", {}, {"lam": 0.9}),
    ("ppo", {}, {"whiten_advantages": False}),
    ("ppo", {}, {"kl_coef": 0.3}),
    ("sft", {}, NORM),
    ("sft", NORM, {"norm_length": 9}),
]
LOOP_OPTIONS = {"num_minibatches", "num_ppo_epochs", "dynamic_sampling", "num_critic_only_steps"}
CRITIC_OPTIONS = {"value_clip"}  # see test_ppo.py


@pytest.mark.parametrize(("name", "options", "change"), CASES)
def test_option_changes_the_gradient(name, options, change):
    _, before, loss, _ = run(build(name, **options))
    _, after, changed, _ = run(build(name, **options | change))
    same_logprobs = torch.allclose(before.logprobs_M.grad, after.logprobs_M.grad)
    if "entropy_coef" in change:
        assert before.entropy_M.grad is None and after.entropy_M.grad.any()
    else:
        assert not same_logprobs or not torch.allclose(loss, changed)


def test_no_option_is_left_out_above():
    tested = {key for _, _, change in CASES for key in change} | LOOP_OPTIONS | CRITIC_OPTIONS
    known = {field.name for name in NAMES for field in fields(build(name).Config)}
    assert known == tested


@pytest.mark.parametrize("name", NAMES)
def test_loop_options_are_read_from_the_config(name):
    algorithm = build(name, num_minibatches=3)
    assert algorithm.num_minibatches == 3
    names = {field.name for field in fields(algorithm.Config)}
    for key, value in (("num_ppo_epochs", 2), ("dynamic_sampling", True)):
        if key in names:
            assert getattr(build(name, **{key: value}), key) == value
        else:
            assert getattr(algorithm, key) == (1 if key == "num_ppo_epochs" else False)


@pytest.mark.parametrize("name", NAMES)
def test_yaml_keys_are_the_config_s_fields_and_each_has_a_comment(name):
    text = (CONF / f"{name}.yaml").read_text()
    keys = list(yaml.safe_load(text))
    assert keys[0] == "_target_"
    assert set(keys[1:]) == {field.name for field in fields(build(name).Config)}
    lines = text.splitlines()
    for above, line in itertools.pairwise(lines):
        assert line.startswith("#") or above.startswith("#"), line


def test_passes_follow_the_kl():
    assert build("sft").passes == ()
    assert build("grpo", kl_coef=0.0).passes == ("old_logprobs",)
    assert build("grpo", kl_coef=0.1).passes == ("old_logprobs", "ref_logprobs")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"policy_loss": "reinforce"}, "clip_low .* has no effect.*set clip_low: null"),
        ("grpo", {"clip_high": None}, "clip_high is null but policy_loss: ppo_clip needs it"),
        ("grpo", {"policy_loss": "cispo", "dual_clip": 3.0}, "dual_clip .* has no effect"),
        ("grpo", {"dual_clip": 0.9}, "greater than 1"),
        ("grpo", {"correction_max": 2.0}, "correction_max .* has no effect with correction: none"),
        ("grpo", {"correction": "tis"}, "correction_max is null"),
        ("grpo", MASK | {"correction_min": 3.0}, "must be below correction_max"),
        ("grpo", MASK | {"correction": "sequence_mask"}, "correction_sequence is null"),
        ("grpo", {"kl_unbiased": True}, "kl_unbiased .* has no effect with kl_coef: 0.0"),
        ("grpo", {"norm_length": 8}, "norm_length .* has no effect"),
        ("grpo", {"normalize_std": False}, "std .* has no effect with normalize_std: false"),
        ("reinforce_pp", {"singleton": "raw"}, "singleton .* has no effect"),
        ("dapo", {"clip_high": 0.1}, "clip_high .* must be above clip_low"),
        ("gspo", {"policy_loss": "ppo_clip"}, "gspo"),
        (
            "dr_grpo",
            {"loss_aggregation": "sequence_mean_token_mean", "norm_length": None},
            "length bias",
        ),
        ("sft", {"kl_coef": 0.1}, "kl_coef"),
    ],
)
def test_option_that_would_be_ignored_is_refused(name, options, message):
    with pytest.raises(ValidationError, match=message):
        build(name, **options)


def test_importing_every_algorithm_imports_nothing_heavy():
    modules = sorted({yaml.safe_load(path.read_text())["_target_"] for path in CONF.glob("*.yaml")})
    code = (
        "import importlib, json, sys\n"
        f"for name in {modules}: importlib.import_module(name.rpartition('.')[0])\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "ray", "vllm", "megatron", "numpy"} & set(json.loads(done.stdout))
