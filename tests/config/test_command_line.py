"""Whole command lines, as a user types them: wrong ones, help, completion."""

from __future__ import annotations

import os
import resource
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from rlpost.arguments import as_hydra_takes_it
from rlpost.composition import compose_node
from rlpost.config import load
from rlpost.rerun import write_rerun

REPOSITORY = Path(__file__).parent.parent.parent
LAUNCH = REPOSITORY / "launch.py"
# The line, and what each of its faults is answered with.
WRONG = [
    ("+recipe=grpo_chian algoritm=grpo", ["did you mean 'grpo_chain'?", "mean 'algorithm'?"]),
    (
        "algorithm=grpp trainer.optimizer.lrr=1 group_size=0",
        ["mean 'grpo'?", "mean 'trainer.optimizer.lr'?", "group_size: got 0; allowed: integer > 0"],
    ),
    ("distillation=topkk distillation.k=0 teacher=chain", ["mean 'topk'?", "k: got 0"]),
    ("lr=1e-5 batch_size=64", ["mean 'trainer.optimizer.lr'?", "mean 'train_batch_size'?"]),
    ("trainer.lr=1 trainer.optimizr.lr=1", ["trainer.lr=1: ", "trainer.optimizr.lr=1: unknown"]),
    ("trainer.optimizer.lr=fast seed=one", ["lr: got 'fast'; allowed: number > 0", "seed: got"]),
    ("rollout.generate_deadline_s=10min", ["got '10min'; allowed: number > 0, in seconds"]),
    ("group_size=10 train_batch_size=96 seed=-1", ["try 90 or 100", "seed: got -1"]),
    ("clip_low=0.1 +algorithm.clip=1", ["mean 'algorithm.clip_low'?", "algorithm.clip: unknown"]),
    ("algorithm.clip_lo=0.1 ~engin", ["mean 'algorithm.clip_low'?", "~engin: unknown name"]),
    ("engine=null seed=-1", ["engine=null: write ~engine", "seed: got -1"]),
    ("algorithm=[grpo,dapo] seed=-1", ["algorithm takes one option, not a list", "seed: got -1"]),
    ("loop=[sync,async]", ["loop takes one option, not a list"]),
    ("seed=1,2 algorithm=grpo,rloo", ["seed=1,2: several values are a sweep", "rloo: several"]),
    ("seed trainer.optimizer.lr", ["write seed=<value>", "write trainer.optimizer.lr=<value>"]),
    ("loop=async loop.colocate=true seed=-1", ["it belongs to loop=sync", "seed: got -1"]),
    ("model.path=./nowhere", ["model.path=./nowhere: unknown name; it belongs to model=hf"]),
    ("model=hf model.path=./nowhere group_size=0", ["no folder './nowhere'", "group_size: got 0"]),
    ("algorithm=ppo train_batch_size=20", ["critic: null, but Ppo", "try 16 or 24"]),
    ("critic=megatron group_size=0", ["critic: has no effect, as Grpo", "group_size: got 0"]),
    ("distillation=topk", ["distillation: needs a teacher", "add one: teacher=chain"]),
    ("teacher=chain", ["would have no effect without distillation", "take the teacher out"]),
    (
        "teacher=chain distillation=topk distillation.k=99",
        ["k (99) is more than the 32 tokens"],
    ),
    ("trainer=megatron_gpu", ["cluster.num_gpus"]),
    ("tracking=[mlflow,tensorbord]", ["did you mean 'tensorboard'?"]),
    ("tracking=wandb", ["tracking=wandb: unknown name; valid: mlflow, none, tensorboard"]),
    ("tracking.tracking_uri=x", ["mean 'tracking.mlflow.tracking_uri'?"]),
    ("tracking.tensorboard.max_queued=1", ["it belongs to tracking=tensorboard"]),
    ("tracking.mlflow.tracking_uri=mlflow.db", ["must be an address such as 'sqlite:///"]),
    ("-m hydra/launcher=slurm seed=1,2", ["did you mean 'submitit_slurm'?"]),
    ("-m hydra/sweeper=optunaa algorithm=grpp,dapo", ["mean 'optuna'?", "mean 'grpo'?"]),
    ("+sweep=lr seed=1,2", ["sweep=lr: unknown name; valid: lr_algorithm, optuna_lr"]),
    ("hydra.job.chdirr=true", ["mean 'hydra.job.chdir'?"]),
    ("+debug=fast seed=-1", ["+debug=fast: the group has its place already", "seed: got -1"]),
    ("trainer.optimizer.lr.x=1", ["unknown name; trainer.optimizer.lr holds no keys\n"]),
    (
        "--config-dir nowhere seed=-1",
        ["--config-dir: there is no folder /", "/nowhere\n", "got -1"],
    ),
    (
        "hydra.searchpath=[nowhere] algorithm=x",
        ["hydra.searchpath: there is no folder /", "x: unkn"],
    ),
    ("hydra.searchpath=[nowhere]", ["1 configuration problem:\n  - hydra.searchpath: there is no"]),
    ("hydra.searchpath=nowhere", ["a list belongs here: hydra.searchpath=[nowhere]"]),
    ("output_dir=/proc/x", ["output_dir: can't make '/proc/x' (No such file", "can be written"]),
    ("-m output_dir=/proc/x seed=1,2", ["output_dir: can't make '/proc/x' (No such file"]),
    (
        "-m seed=1,x algorithm=grpo,ppo group_size=8,10 train_batch_size=96",
        [
            "3 configuration problems",
            "with seed=x: seed: got 'x'; allowed: integer >= 0",
            "with seed=1 algorithm=grpo group_size=10, and in 1 more jobs: train_batch_size (96)",
            "with seed=1 algorithm=ppo group_size=8, and in 1 more jobs: critic: null, but Ppo",
        ],
    ),
    ("group_size=0 -m seed=1,2", ["1 configuration problem:\n  - group_size: got 0"]),
    ("-m algorithm=glob(gr*) seed=x", ["1 configuration problem:\n  - seed: got 'x'"]),
    ("-m algorithm=glob(x*) seed=glob(*)", ["fits no option; valid: cispo", "the options of a gr"]),
    ("-m algorithm=glob(gr*) sed=1", ["1 configuration problem:\n  - sed=1: unknown name"]),
    ("-m algorithm.clip_low=interval(0,1)", ["a range is for a search", "hydra/sweeper=optuna"]),
    ("-cn conf", ["-cn conf: ", "has no conf.yaml; it has: config\n"]),
]
OWN_FOLDER = ("hydra.searchpath=[{own}]", "hydra.searchpath=[file://{own}]", "--config-dir {own}")
# Beside `-cp <run folder> -cn rerun`.
WRONG_BESIDE_A_SAVED_RUN = [
    ("sed=2 trainer.optimizer.lrr=1", ["mean 'seed'?", "mean 'trainer.optimizer.lr'?"]),
    ("group_sise=4 seed=-1", ["mean 'group_size'?", "seed: got -1; allowed: integer >= 0"]),
    ("algorithm=rloo seed=-1", ["rerun.yaml has no options to choose from", "algorithm.<key>"]),
    ("seed", ["write seed=<value>"]),
    ("-cn again", ["-cn again: ", "has no again.yaml; it has: rerun"]),
]
COMPLETED = {
    "python launch.py +recipe=gr": "+recipe=grpo_chain",
    "python launch.py algorithm=": "algorithm=dapo",
    "python launch.py +recipe=grpo_chain trainer.optimizer.": "trainer.optimizer.lr=",
    "python launch.py tracking.mlflow.tr": "tracking.mlflow.tracking_uri=",
}
# The function that `-sc install=bash` prints, called as bash calls it at a press of Tab.
BASH = """
eval "$(python launch.py -sc install=bash)"
COMP_LINE="$1"
COMP_POINT=${#COMP_LINE}
COMP_WORDS=($COMP_LINE)
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
hydra_bash_completion
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_flags_may_stand_anywhere() -> None:
    line = "a=1 -m +recipe=x --config-dir x=y ~b --info defaults c=2 --cfg job -i d=3"
    asked = "-m --config-dir x=y --info defaults --cfg job -i a=1 recipe=x ~b c=2 d=3"
    assert as_hydra_takes_it(line.split()) == asked.split()


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), **more}


def timed(command: list[str], folder: Path, env: Mapping[str, str]) -> tuple[float, str, str, int]:
    """Processor seconds, which other work on the machine does not change; stdout; stderr; code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, done.stdout, done.stderr, done.returncode


@pytest.mark.parametrize(("line", "answers"), WRONG, ids=[line for line, _ in WRONG])
def test_every_fault_of_a_line_is_answered(
    line: str,
    answers: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    err = refused(line, tmp_path, monkeypatch, capsys)
    assert [answer for answer in answers if answer not in err] == [], err


def refused(
    line: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """What launch.py says of `line` in `folder` before it exits with 2."""
    arguments = [*shlex.split(line), "plan=true"]  # should a fault pass, nothing starts
    GlobalHydra.instance().clear()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
    monkeypatch.setattr("hydra.core.utils.configure_log", lambda *_: None)
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(LAUNCH), run_name="__main__")
    err = capsys.readouterr().err
    assert exit_.value.code == 2, err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("way", OWN_FOLDER)
def test_options_of_ones_own_are_known_beside_a_fault(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    (own / "algorithm").mkdir(parents=True)
    (own / "algorithm" / "mine.yaml").write_text("defaults: [grpo]\n")
    line = f"{way.format(own=own)} algorithm=mine sed=2 group_size=0"
    err = refused(line, tmp_path, monkeypatch, capsys)
    assert "2 configuration problems" in err and "algorithm" not in err, err
    assert "mean 'seed'?" in err and "group_size: got 0" in err


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a saved run."""
    folder = tmp_path_factory.mktemp("saved")
    write_rerun(load(compose_node(["+recipe=grpo_chain"])).plain(), folder)
    return folder


@pytest.mark.parametrize(("line", "answers"), WRONG_BESIDE_A_SAVED_RUN)
def test_every_fault_beside_a_saved_run_is_answered(
    line: str,
    answers: list[str],
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    err = refused(f"-cp {saved} -cn rerun {line}", tmp_path, monkeypatch, capsys)
    assert [answer for answer in answers if answer not in err] == [], err
    assert "algorithm: got" not in err


@pytest.mark.parametrize("line", [WRONG[1][0], WRONG[7][0], WRONG[30][0]])
def test_a_process_answers_a_wrong_line_within_two_seconds(line: str, tmp_path: Path) -> None:
    command = [sys.executable, str(LAUNCH), *shlex.split(line)]
    seconds, _, err, code = timed(command, tmp_path, environment())
    answers = dict(WRONG)[line]
    assert code == 2 and all(answer in err for answer in answers), err
    assert "Traceback" not in err and seconds < 2


def test_help_names_each_group_and_option_within_a_second(tmp_path: Path) -> None:
    seconds, out, _, code = timed([sys.executable, str(LAUNCH), "--help"], tmp_path, environment())
    assert code == 0 and seconds < 1
    for folder in (path for path in (REPOSITORY / "conf").iterdir() if path.is_dir()):
        options = [file.stem for file in sorted(folder.glob("*.yaml"))]
        assert folder.name == "hydra" or f"{folder.name:<14}{', '.join(options)}" in out


def test_the_configuration_is_printed_within_a_second(tmp_path: Path) -> None:
    command = [sys.executable, str(LAUNCH), "--cfg", "job", "+recipe=grpo_chain"]
    seconds, out, _, code = timed(command, tmp_path, environment())
    assert code == 0 and "MlflowTracker" in out and seconds < 1


@pytest.mark.parametrize("line", COMPLETED)
def test_bash_completes(line: str) -> None:
    """Twice launch.py and once bash, within a second each."""
    command = ["bash", "-c", BASH, "bash", line]
    seconds, out, err, _ = timed(command, REPOSITORY, environment())
    assert COMPLETED[line] in out.splitlines(), out + err
    assert seconds < 3
