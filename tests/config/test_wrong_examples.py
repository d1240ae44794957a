"""What a user sees for each kind of mistake. All end with exit code 2 before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from rlpost.checks import check
from rlpost.cli import readable_errors
from rlpost.config import load
from rlpost.errors import ConfigError
from rlpost.overrides import compose_node

REPOSITORY = Path(__file__).parent.parent.parent
# Overrides, and what the message must say.
WRONG = [
    ("algorithm=grpp", "algorithm=grpp: unknown name; did you mean 'grpo'?"),
    ("algoritm=grpo", "algoritm=grpo: unknown name; did you mean 'algorithm'?"),
    ("+recipe=grpo_chian", "+recipe=grpo_chian: unknown name; did you mean 'grpo_chain'?"),
    ("+recpie=grpo_chain", "recpie: unknown key or group; did you mean 'recipe'?"),
    ("group_sizes=4", "group_sizes=4: unknown name; did you mean 'group_size'?"),
    ("trainer.optimizer.lrr=1", "did you mean 'trainer.optimizer.lr'?"),
    ("group_size=[", "can't read the override 'group_size=['"),
    ("group_size=0", "group_size: got 0; allowed: integer > 0"),
    ("group_size=eight", "group_size: got 'eight'; allowed: integer > 0"),
    ("group_size=2.5", "group_size: got 2.5; allowed: integer > 0"),
    ("group_size=null", "group_size: got None; allowed: integer > 0"),
    ("group_size=???", "group_size: no value given (???); set it: group_size=..."),
    ("run_name=a/b", "run_name: got 'a/b'; allowed: string"),
    ("run_name=${nothing}", "Interpolation key 'nothing' not found"),
    ("+algorithm.clip=1", "algorithm.clip: unknown key; did you mean 'clip_low'?"),
    ("algorithm.clip_low='0.2'", "it is a string: remove the quotes"),
    ("algorithm.loss_aggregation=token_men", "did you mean 'token_mean'?"),
    ("algorithm._target_=os.system", "must start with one of ['rlpost.'] (see trusted_prefixes)"),
    ("algorithm._target_=rlpost.algorithms.grpo.Gropo", "did you mean 'Grpo'?"),
    ("num_steps=3", "give exactly one of num_steps (3) and num_epochs (1)"),
    ("num_epochs=null", "give exactly one of num_steps (None) and num_epochs (None)"),
    (
        "group_size=10 train_batch_size=96",
        "train_batch_size (96) must be a multiple of group_size (10); try 90 or 100",
    ),
    (
        "group_size=8 train_batch_size=24 algorithm.num_minibatches=2",
        "algorithm.num_minibatches (2) must divide the 3 prompts of a batch",
    ),
    ("group_size=1", "group_size (1): Grpo compares the rewards of a group, so with algorithm.sin"),
    ("group_size=1 algorithm=reinforce_pp_baseline", "group_size (1): ReinforcePp compares the re"),
    (
        "group_size=1 algorithm=dapo algorithm.singleton=raw",
        "algorithm.dynamic_sampling: has no effect with group_size (1)",
    ),
    ("trainer.optimizer.lr=inf", "trainer.optimizer.lr: got inf; allowed: finite numbers"),
    ("eval.num_samples=4", "num_samples (4) answers are all the same at temperature 0"),
    ("eval.top_p=1.5", "eval.top_p: got 1.5; allowed: number > 0 and <= 1"),
    ("resume_from=outputs/nowhere", "resume_from: there is no folder 'outputs/nowhere'"),
    ("seed=${nothing}", "seed: interpolation '${nothing}' can't be resolved"),
    ("engine=null", "engine=null: write ~engine to switch the group off"),
    ("~engine", "engine: null, but SingleTurn samples from engines"),
    ("~weight_sync", "weight_sync: null, but engines would keep their first weights"),
    ("~reward", "reward: null, but what SingleTurn samples has to be scored"),
    ("trusted_prefixes=3", "trusted_prefixes: got 3; allowed: list of string"),
    ("~trainer", "~trainer: a run needs one; choose trainer=<option>: megatron"),
    ("~loop", "~loop: a run needs one; choose loop=<option>: async, fully_async, sync"),
    ("model=null", "model=null: a run needs one; choose model=<option>: hf, "),
    ("model=hf", "model.path: no value given (???); set it: model.path=..."),
    ("model=hf model.path=./nowhere", "model.path: there is no folder './nowhere'"),
    ("rollout=reference", "set group_size=1 with rollout=reference"),
    ("rollout=reference group_size=1", "engine: has no effect, as ReferenceRollout asks no"),
    ("rollout=reference group_size=1", "Grpo compares with the policy that sampled"),
    ("trainer.data_parallel_size=3", "must be a multiple of the trainer's 3 data-parallel ranks"),
    ("distillation=topk", "distillation: needs a teacher, but teachers is empty; add one"),
    ("teacher=chain", "teachers: default would have no effect without distillation"),
    (
        "teacher=chain distillation=topk algorithm=sft",
        "distillation: joins the policy-gradient loss, but Sft has none",
    ),
    (
        "teacher=chain distillation=topk distillation.k=0",
        "distillation.k: got 0; allowed: integer > 0",
    ),
    (
        "teacher=chain distillation=full trainer.data_parallel_size=2",
        "teachers.default.trainer.data_parallel_size (1): with distillation=full the teacher lives",
    ),
    (
        "teacher=chain +model@teachers.b.model=tiny_chain +trainer@teachers.b.trainer=megatron "
        "distillation=topk",
        "distillation.route_by: null, but there are 2 teachers (default, b)",
    ),
    (
        "teacher=chain distillation=topk teachers.default.model.max_length=60",
        "are more than teachers.default.model.max_length (60); raise it",
    ),
    (
        "rollout.max_response_tokens=1000",
        "rollout.max_prompt_tokens (32) + rollout.max_response_tokens (1000) are more than",
    ),
]


def message(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Composes and checks as launch.py does; what went to stderr. Fails if nothing is wrong."""
    monkeypatch.setattr(sys, "argv", ["launch.py", *overrides])
    with pytest.raises(SystemExit) as exit_, readable_errors():
        check(load(compose_node(overrides)))
    assert exit_.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("overrides", "expected"), WRONG, ids=[item for item, _ in WRONG])
def test_a_mistake_is_explained_and_ends_with_2(
    overrides: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert expected in message(overrides.split(" "), monkeypatch, capsys)


def test_all_mistakes_are_reported_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["seed=-1", "+algorithm.clip=1", "algorithm.kl_coef=x", "+checkpoint.every=1"]
    text = message(overrides, monkeypatch, capsys)
    assert "4 configuration problems:" in text
    for key in ("seed:", "algorithm.clip:", "algorithm.kl_coef:", "checkpoint.every:"):
        assert f"\n  - {key}" in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("group_size=0", "group_size: got 0; allowed: integer > 0"),
        ("+recipe=grpo_chian", "did you mean 'grpo_chain'?"),
        ("trainer.optimizer.lrr=1", "did you mean 'trainer.optimizer.lr'?"),
        ("output_dir=/proc/nowhere", "output_dir: can't make '/proc/nowhere' (No such file"),
    ],
)
def test_launch_prints_the_mistake_without_a_traceback(
    override: str, expected: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(REPOSITORY / "launch.py"), override, "plan=true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not [*tmp_path.rglob("launch.log")]


def test_two_runs_started_in_the_same_second_have_two_folders() -> None:
    folders = set()
    for _ in range(2):
        compose_node(["run_name=r"])
        folders.add(HydraConfig.get().run.dir)
    assert len(folders) == 2


def test_keys_of_a_group_that_is_off_are_named_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"eval: interval set.*take the keys out too: ~eval\.int"):
        load(compose_node(["+recipe=grpo_chain", "~eval"]))
    assert load(compose_node(["+recipe=grpo_chain", "~eval", "~eval.interval"])).eval is None
    with pytest.raises(ConfigError, match=r"critic: trainer set.*keys out too: ~critic\.trainer"):
        load(compose_node(["+recipe=ppo_chain", "~critic"]))
    assert load(compose_node(["+recipe=ppo_chain", "~critic", "~critic.trainer"])).critic is None
