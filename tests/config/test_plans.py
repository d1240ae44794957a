"""The plan of every recipe: quick, without heavy libraries, and refused when it can't fit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlpost.config import load
from rlpost.errors import ConfigError
from rlpost.overrides import CONF, compose_node
from rlpost.plan import RunPlan, run_plan
from rlpost.plan.machine import Machine

GIB = 1 << 30
RECIPES = sorted(file.stem for file in (CONF / "recipe").glob("*.yaml"))
HEAVY = ["torch", "ray", "vllm", "megatron", "transformers", "mlflow", "pyarrow"]
ROOMY = Machine(64 * GIB, 64 * GIB, 80 * GIB, 1000 * GIB)
ON_GPUS = ["+recipe=grpo_smollm2", "cluster=local_gpu", "engine=vllm_gpu", "trainer=megatron_gpu"]
# Runs launch.py once for each recipe, in one process: CPU seconds of each, and what was loaded.
ALL = """
import contextlib, io, json, runpy, sys, time
seconds, told = {{}}, {{}}
for recipe in {recipes!r}:
    sys.argv = ["launch.py", "+recipe=" + recipe, "plan=true", "output_dir={output_dir}"]
    started, output = time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path("launch.py", run_name="__main__")
    seconds[recipe], told[recipe] = time.process_time() - started, output.getvalue()
codes = []
for more in (["plan=true"], []):
    sys.argv = ["launch.py", "+recipe=grpo_chain", "cluster.num_cpus=1", *more]
    sys.argv += ["output_dir={output_dir}", "run_name=refused"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path("launch.py", run_name="__main__")
    except SystemExit as end:
        codes.append(end.code)
loaded = [name for name in {heavy!r} if name in sys.modules]
print(json.dumps([seconds, told, loaded, codes]))
"""


@pytest.fixture(scope="module")
def all_plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """CPU seconds; what was printed; heavy modules loaded; codes of refused ones; output_dir."""
    output_dir = tmp_path_factory.mktemp("plans") / "outputs"
    script = ALL.format(recipes=RECIPES, heavy=HEAVY, output_dir=output_dir)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=CONF.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return (*json.loads(done.stdout), output_dir)


def test_every_recipe_is_planned_in_three_seconds_without_heavy_libraries(all_plans: Any) -> None:
    seconds, _, loaded, *_ = all_plans
    assert loaded == []
    assert set(seconds) == set(RECIPES)
    assert max(seconds.values()) < 3, seconds


def test_held_out_prompts_are_looked_for_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    file, none = f"eval.data.path={tmp_path}/two.jsonl", f"eval.data.path={tmp_path}/none.jsonl"
    for overrides, said in (
        (["eval.num_prompts=1000"], r"num_prompts \(1000\) is more than the 256 prompts"),
        (["data@eval.data=file", file], r"num_prompts \(256\) is more than the 2 prompts"),
        (["data@eval.data=file", none], r"eval\.data: .*none\.jsonl is not a file"),
    ):
        with pytest.raises(ConfigError, match=said):
            RunPlan.of(load(compose_node(overrides)))


def test_a_checkpoint_that_leaves_nothing_to_do_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"step": 6}')
    (tmp_path / "manifest.json").write_text("{}")
    told = {}
    for steps in (6, 7):
        overrides = ["+recipe=grpo_chain", f"num_steps={steps}", f"resume_from={tmp_path}"]
        told[steps] = [
            problem
            for problem in RunPlan.of(load(compose_node(overrides))).problems
            if problem.startswith("resume_from: the checkpoint is of step 6, and the run ends")
        ]
    assert [len(problems) for problems in told.values()] == [1, 0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipes_plan_is_whole(recipe: str, all_plans: Any) -> None:
    text = all_plans[1][recipe]
    for title in ("batch", "steps", "passes, in order", "placement", "memory of each worker"):
        assert re.search(f"^{title} *$", text, re.MULTILINE), text
    for word in ("actor[0]", "train: actor", "weights", "optimizer", "in one checkpoint"):
        assert word in text
    assert "unknown" not in text


def test_what_cannot_fit_ends_with_2_whether_it_is_planned_or_run(all_plans: Any) -> None:
    assert all_plans[3] == [2, 2]


def test_a_plan_leaves_no_folder(all_plans: Any) -> None:
    assert [path.name for path in all_plans[4].glob("*")] == ["refused"]  # it was to run


# -- one plan ------------------------------------------------------------------------------------


def planned(monkeypatch: pytest.MonkeyPatch, *overrides: str, machine: Machine = ROOMY) -> RunPlan:
    monkeypatch.setattr(run_plan, "this_machine", lambda folder, *, with_gpus: machine)
    return RunPlan.of(load(compose_node(list(overrides))))


def test_sizes_come_from_the_recipe_that_builds_the_model(monkeypatch: Any) -> None:
    plan = planned(monkeypatch, "+recipe=grpo_prm_distill")
    student, teacher = plan.num_parameters["actor"], plan.num_parameters["teacher.default"]
    assert student == plan.num_parameters["engine"] == 1_131_904
    assert teacher is not None and student is not None
    assert teacher - student == (student - 2 * 32 * 256 - 256) // 2  # one layer more than two


def test_a_hub_model_that_is_not_there_is_unknown(monkeypatch: Any) -> None:
    plan = planned(monkeypatch, "+recipe=grpo_chain", "model=hf", "model.path=no-owner/no-model")
    assert plan.memory.unknown == dict.fromkeys(
        ["actor", "engine"], "unknown until the model is there"
    )
    assert plan.disk is None and plan.problems == ()


def test_a_local_models_config_is_read(monkeypatch: Any, tmp_path: Path) -> None:
    settings = {
        **{"model_type": "llama", "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": True},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    plan = planned(monkeypatch, "+recipe=grpo_chain", "model=hf", f"model.path={tmp_path}")
    assert plan.num_parameters["actor"] == 100 * 8 + 4 * 8 * 8 + 3 * 8 * 16 + 3 * 8


def test_gpus_of_roles_that_take_turns_are_shared(monkeypatch: Any) -> None:
    shares = ["engine.num_gpus_per_engine=0.5", "trainer.num_gpus_per_rank=0.5"]
    two = ["engine.num_engines=2", "trainer.data_parallel_size=2", "loop.colocate=true"]
    plan = planned(monkeypatch, *ON_GPUS, *shares, *two)
    assert [(bundle.gpus, bundle.name) for bundle in plan.bundles] == [
        ((0,), "actor[0]"),
        ((0,), "engine[0]"),
        ((1,), "actor[1]"),
        ((1,), "engine[1]"),
        ((), "rollout[0]"),
    ]
    assert plan.colocated == ("rank 0: actor 0.5 + engine 0.5", "rank 1: actor 0.5 + engine 0.5")
    (load, other) = plan.memory.devices.values()
    engine = plan.memory.workers["engine"][0].device_bytes
    assert load == other and load.planned == engine == int(0.85 * 80 * GIB)


def test_nodes_are_filled_one_after_the_other(monkeypatch: Any) -> None:
    nodes = ["cluster=slurm", "cluster.num_nodes=2", "cluster.num_gpus_per_node=2"]
    gpus = ["engine=vllm_gpu", "trainer=megatron_gpu", "engine.num_engines=2"]
    more = ["trainer.data_parallel_size=2"]
    plan = planned(monkeypatch, "+recipe=grpo_chain", *gpus, *nodes, *more)
    assert [(bundle.node, bundle.gpus, bundle.role) for bundle in plan.bundles] == [
        (0, (0,), "actor"),
        (0, (1,), "actor"),
        (0, (), "rollout"),
        (1, (0,), "engine"),
        (1, (1,), "engine"),
    ]
    assert plan.machine.host_bytes is None  # this machine is none of the job's


def test_the_optimizer_is_cut_over_data_parallel_ranks(monkeypatch: Any) -> None:
    one, two = (
        planned(monkeypatch, "+recipe=grpo_smollm2", f"trainer.data_parallel_size={size}")
        for size in (1, 2)
    )
    parts = [dict(plan.memory.workers["actor"][0].parts) for plan in (one, two)]
    assert parts[0]["weights"] == parts[1]["weights"] == 4 * 134_515_008
    assert parts[0]["optimizer"] == 2 * parts[1]["optimizer"] == 8 * 134_515_008


def test_a_plan_is_written_for_people_and_for_programs(monkeypatch: Any, tmp_path: Path) -> None:
    plan = planned(monkeypatch, "+recipe=ppo_chain")
    text, data = plan.write(tmp_path)
    assert "critic[0]" in text.read_text()
    values = json.loads(data.read_text())
    assert values["order"][-1] == ["train: actor", "train: critic"]
    assert values["memory"]["workers"]["critic"][0]["parts"]["optimizer"] > 0


def test_a_run_says_its_plan_in_few_lines_and_a_sweeps_job_only_its_warnings(
    monkeypatch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tight = Machine(32 * GIB, 1 * GIB, None, 1000 * GIB)
    plan = planned(monkeypatch, "+recipe=grpo_prm_distill", machine=tight)
    plan.announce(tmp_path, in_sweep=False)
    *lines, warning = capsys.readouterr().out.splitlines()
    for line, said in zip(
        lines,
        (
            "trains      actor (1.13 M parameters) by Grpo on chain_sum",
            "batch       32 prompts x 4 = 128 samples, 1 optimizer step of 128, 64 on each of 2",
            "steps       24, an epoch has 250; staleness: 0 versions",
            "workers     actor x 2 on CPU, teacher.default on CPU, engine on CPU, rollout on CPU",
            "takes       ~",
            f"whole plan  {tmp_path}/plan.txt",
        ),
        strict=True,
    ):
        assert line.startswith(said)
    assert warning.startswith("warning: about ")
    plan.announce(tmp_path, in_sweep=True)
    assert capsys.readouterr().out.splitlines() == [warning]


def test_few_lines_count_gpus_and_nodes(
    monkeypatch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = ["trainer.data_parallel_size=2", "cluster=slurm", "cluster.num_nodes=2"]
    plan = planned(monkeypatch, *ON_GPUS, *ranks, "cluster.num_gpus_per_node=2")
    plan.announce(tmp_path, in_sweep=False)
    said = "workers     actor x 2 on 2 GPUs, rollout on CPU, engine on 1 GPU; on 2 nodes\n"
    assert said in capsys.readouterr().out


def test_half_a_run_has_half_a_plan(monkeypatch: Any, tmp_path: Path) -> None:
    half = planned(monkeypatch, "+recipe=grpo_prm_distill", "debug=rollout_only")
    assert {bundle.role for bundle in half.bundles} == {"engine", "rollout"}
    assert half.order == () and half.disk is not None and half.disk.peak_bytes == 0
    saved = ["debug=train_only", f"debug.samples_from={tmp_path}"]
    other = planned(monkeypatch, "+recipe=grpo_prm_distill", *saved)
    assert {bundle.role for bundle in other.bundles} == {"actor", "teacher.default", "rollout"}
    assert other.memory.object_store == 0 and other.staleness == "nothing is generated"


# -- what can't fit ------------------------------------------------------------------------------

SMALL_HOST = Machine(20 * GIB, 20 * GIB, None, 1000 * GIB)
EIGHT_BILLION = [
    *["model=tiny_init", "model.num_layers=32", "model.hidden_size=4096", "model.num_heads=32"],
    *["model.num_key_value_heads=8", "model.intermediate_size=14336", "model.dtype=bfloat16"],
    *["cluster.num_gpus=16"],
]
NINE_HEADS = [
    *["model=tiny_init", "model.num_layers=32", "model.hidden_size=4608", "model.num_heads=9"],
    *["model.num_key_value_heads=3", "model.intermediate_size=13824", "model.dtype=bfloat16"],
    *["cluster.num_gpus=16"],
]
SMALL_DISK = Machine(64 * GIB, 64 * GIB, 80 * GIB, 6 * GIB)
SMOL = "+recipe=grpo_smollm2"
REFUSED: list[tuple[Machine, list[str], str]] = [
    (
        ROOMY,
        ["+recipe=grpo_chain", "cluster.num_cpus=3"],
        r"cluster.num_cpus \(3\) is less than the roles need \(4: actor 2, engine 1, rollout 1\); "
        r"set cluster.num_cpus=4 or trainer.data_parallel_size=1",
    ),
    (
        ROOMY,
        [*ON_GPUS, "engine.num_engines=4"],
        r"cluster.num_gpus \(4\) is less than the roles need \(5: actor 1, engine 4\); "
        r"set cluster.num_gpus=5 or engine.num_engines=3",
    ),
    (
        SMALL_HOST,
        [SMOL, "engine.vllm.kv_cache_memory_bytes=10000000000", "engine.num_engines=2"],
        r"memory of node 0: engine\[0\] 9.8 GiB \(kv_cache 9.3 GiB\) \+ .* \+ actor\[0\] 2.0 GiB "
        r"\(optimizer 1.0 GiB\) exceeds 20 GiB; try engine.vllm.kv_cache_memory_bytes=\d+",
    ),
    (
        ROOMY,
        [*ON_GPUS, *EIGHT_BILLION],
        r"GPU 0 of node 0: actor\[0\] 117 GiB \(optimizer 78 GiB\) exceeds 80 GiB; try "
        r"trainer.tensor_model_parallel_size=2 or trainer.data_parallel_size=4",
    ),
    (
        ROOMY,
        [*ON_GPUS, *NINE_HEADS],
        r"GPU 0 of node 0: actor\[0\] .* exceeds 80 GiB; try "
        r"trainer.tensor_model_parallel_size=3 or",
    ),
    (
        ROOMY,
        ["+recipe=grpo_chain", "engine.vllm.kv_cache_memory_bytes=100000"],
        r"engine.vllm: a KV cache of 98 KiB holds 97 tokens, less than one sequence of max_length "
        r"\(128\); set kv_cache_memory_bytes to 1048576 or more, or lower max_length",
    ),
    (
        SMALL_DISK,
        [SMOL, "checkpoint.keep_last=3", "checkpoint.save_interval=1"],
        r"checkpoint.keep_last \(3\): checkpoints of 2.5 GiB take up to 10 GiB .* 6.0 GiB free; "
        r"set checkpoint.keep_last=1, or choose another output_dir",
    ),
]


@pytest.mark.parametrize(
    ("machine", "overrides", "said"), REFUSED, ids=[x[2][:24] for x in REFUSED]
)
def test_what_cannot_fit_is_refused_with_the_change_that_would(
    monkeypatch: Any, machine: Machine, overrides: list[str], said: str
) -> None:
    plan = planned(monkeypatch, *overrides, machine=machine)
    with pytest.raises(ConfigError, match=said) as error:
        plan.check()
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("machine", "overrides", "said"), REFUSED, ids=[x[2][:24] for x in REFUSED]
)
def test_the_suggested_change_fits(
    monkeypatch: Any, machine: Machine, overrides: list[str], said: str
) -> None:
    (problem,) = planned(monkeypatch, *overrides, machine=machine).problems
    for change in re.findall(r"[a-z_]+\.[\w.]+=\w+", problem):
        assert planned(monkeypatch, *overrides, change, machine=machine).problems == ()


def test_estimates_warn_and_refuse_nothing(monkeypatch: Any) -> None:
    tight = Machine(4 * GIB, 3 * GIB, None, 1000 * GIB)
    plan = planned(
        monkeypatch, "+recipe=grpo_chain", "cluster.object_store_bytes=1000000", machine=tight
    )
    assert plan.problems == ()
    memory, store = plan.warnings
    assert re.match(r"about \d\.\d GiB of memory are planned on this machine, of which 3.0", memory)
    assert "set cluster.object_store_bytes=4527616" in store


def test_ranks_that_cannot_share_a_model_evenly_are_refused(monkeypatch: Any) -> None:
    sizes = ["trainer.tensor_model_parallel_size=3", "engine.tensor_parallel_size=3"]
    cut = planned(
        monkeypatch, "+recipe=grpo_chain", *sizes, "trainer.pipeline_model_parallel_size=40"
    )
    heads = "tensor_parallel (3) must divide the model's num_attention_heads (8); try 2"
    assert {f"actor: {heads}", f"engine: {heads}"} <= set(cut.problems)
    shared = ["model=tiny_init", "model.num_heads=12", "model.num_key_value_heads=4"]
    six = ["model.hidden_size=96", "trainer.tensor_model_parallel_size=6"]
    keys = planned(monkeypatch, "+recipe=grpo_chain", *shared, *six, "model.intermediate_size=192")
    assert keys.problems[0] == (
        "actor: tensor_parallel (6) must divide the model's num_key_value_heads (4) or be a "
        "multiple of it; try 4"
    )
    layers = "actor: pipeline_parallel (40) must divide the model's num_hidden_layers (2); try 2"
    assert layers in cut.problems
