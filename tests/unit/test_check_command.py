"""`python -m rlpost check`: what keeps a contract passes, what breaks it is told what to change."""

from __future__ import annotations

import pytest
import yaml

from rlpost.__main__ import main
from rlpost.composition import CONF
from rlpost.contracts.subject import nodes

GROUPS = ("algorithm", "reward", "prm", "data")
# What stands for a value of another section, and what a user has to give.
GIVEN = {
    "rlpost.rewards.overlong.OverlongPenalty": ["max_response_tokens=32"],
}
# Made of parts, or run inside the rollout worker; their contract tests start what they need.
NOT_PLAIN = ("RewardSet", "Prm", "PoolingEngine", "FileSource")


def classes_of(group: str) -> set[str]:
    files = sorted((CONF / group).glob("*.yaml"))
    found = {
        node.get("_target_") for file in files for node in nodes(yaml.safe_load(file.read_text()))
    }
    return {path for path in found if path and not path.endswith(NOT_PLAIN)}


OURS = sorted(path for group in GROUPS for path in classes_of(group))


@pytest.mark.parametrize("path", OURS)
def test_our_own_classes_keep_their_contracts(path, capsys):
    config = GIVEN.get(path, [])
    code = main(["check", path, *(["--config", *config] if config else [])])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "FAIL" not in out


GRPO = {
    key: value
    for key, value in yaml.safe_load((CONF / "algorithm" / "grpo.yaml").read_text()).items()
    if key != "_target_"
}
WRONG = {
    "NotThere": "can be imported: module wrong_classes has no 'NotThere'",
    "NoConfig": "has a Config: write a frozen dataclass NoConfigConfig",
    "WithDefault": "Config has no defaults: wanted has one; write the value into the YAML",
    "Mutable": "Config is a frozen dataclass: MutableConfig can be changed",
    "Local": "can be sent to another process: ",
    "NoMethod": "is of a known kind: NoMethod has none of loss() (algorithm), score_steps()",
    "Raises": "score() gives a finite number for any response: it raised ZeroDivisionError",
    "Exits": "score() gives a finite number for any response: it raised SystemExit",
    "Text": "score() of the response '' (stop) is '1.0' (str); return a float",
    "NotFinite": "is nan; return a finite number, or raise an error",
    "Awaited": "is awaited; write a plain `def`, not async",
    "Random": "score() is deterministic: the response '' (stop) got ",
    "Remembers": "score() is deterministic: the response '' (stop) got ",
    "Writes": "it changes the prompt's metadata, which other rewards read",
    "Slow": "one call takes longer than 0.2 s",
    "TooFewScores": "0 steps got [1.0]; give a list with one score for each",
    "Incomplete": "outcome, token_advantages, aggregation_weights missing",
    "MeanLoss": "losses of micro-batches add up: ",
    "Unweighted": "tokens without weight have no influence: ",
    "Detached": "gradients reach the log-probs: the loss has no gradient",
    "OtherLeaf": "no gradient reaches inputs.logprobs_M",
    "NoScalar": "return sum(weights_M * per_token_loss_M), a scalar tensor",
    "PlainMetrics": "metric 'train/kl' is float; make it with rlpost.metrics.Metric",
    "NanAdvantages": "replace NaN by 0",
    "WrongShape": "outcome() gives one number for each sample: it gave shape (1,)",
    "Noisy": "is deterministic: the same batch gave loss ",
    "InPlace": "loss() writes into advantages_M",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_class_fails_with_the_line_that_fits(name, tmp_path, capsys):
    values = tmp_path / "grpo.yaml"
    values.write_text(yaml.safe_dump(GRPO))
    algorithm = name in list(WRONG)[list(WRONG).index("MeanLoss") :]
    options = ["--yaml", str(values)] if algorithm else []
    assert main(["check", f"wrong_classes.{name}", "--timeout-s", "0.2", *options]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert any(WRONG[name] in line for line in failed), failed


def test_values_come_from_the_command_line_and_wrong_ones_are_named(capsys):
    path = "rlpost.rewards.overlong.OverlongPenalty"
    assert main(["check", path]) == 1
    assert "max_response_tokens: missing; allowed: integer > 0" in capsys.readouterr().out
    assert main(["check", path, "--config", "max_response_tokens=8", "buffer_tokens=9"]) == 1
    assert "buffer_tokens (9) must not exceed" in capsys.readouterr().out


def test_a_reward_is_asked_about_the_prompt_that_is_given(capsys):
    path = "rlpost.rewards.exact_match.ExactMatch"
    assert main(["check", path, "--prompt", "answer=''"]) == 1
    assert "DataError" in capsys.readouterr().out
    assert main(["check", path, "--prompt", "answer=42", "metadata.level=3"]) == 0


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("anwser=2", "a prompt has no field 'anwser'; did you mean 'answer'?"),
        ("{answer: 3}", "'{answer: 3}' is not of the form key=value, such as answer=42"),
        ("metadata=4", "field 'metadata' of a prompt holds keys: metadata.<key>=..., not 4"),
        ("answer.x=4", "field 'answer' of a prompt holds text, not {'x': 4}"),
    ],
)
def test_a_wrong_field_of_the_prompt_is_said_with_exit_code_2(field, said, capsys):
    path = "rlpost.rewards.exact_match.ExactMatch"
    assert main(["check", path, "--prompt", field]) == 2
    assert capsys.readouterr().out.startswith(f"check: {said}")


def test_wrong_usage_is_said_with_exit_code_2(capsys):
    assert main([]) == 2
    assert "usage: python -m rlpost" in capsys.readouterr().out
    assert main(["check", "rlpost.rewards.format.Format", "--config", "pattern"]) == 2
    assert "'pattern' is not of the form key=value" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["check"])
    assert left.value.code == 2
