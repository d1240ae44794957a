"""Batch arithmetic, placement and the rules across sections, on a toy run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from rlpost.checks import check
from rlpost.composition import compose_node
from rlpost.config import RoleConfig, RunConfig, Section, load
from rlpost.errors import ConfigError
from rlpost.plan import RunPlan
from rlpost.plan.arithmetic import Split


@dataclass(frozen=True)
class ToyConfig:
    """Stands for every section: the attributes that plan and checks read."""

    num_minibatches: int = 2
    data_parallel_size: int = 2
    world_size: int = 4
    num_cpus_per_rank: float = 0.5
    num_gpus_per_rank: float = 1.0
    num_engines: int = 3
    num_cpus_per_engine: float = 1.0
    num_gpus_per_engine: float = 0.0
    max_prompt_tokens: int = 10
    max_response_tokens: int = 20
    max_length: int = 30
    start_deadline_s: float = 5.0
    samples: bool = True
    passes: tuple[str, ...] = ("old_logprobs",)
    path: str = "owner/name"
    num_prompts: int = 100
    said: tuple[str, ...] = ()
    num_critic_only_steps: int = 0
    update_weights_interval: int = 1
    max_staleness: int = 2
    save_interval: int = 0
    keep_last: int = 2

    @property
    def env(self) -> dict[str, str]:
        return {}

    @property
    def data(self) -> Section:
        return section()

    def check_size(self, num_prompts: int) -> None:
        assert num_prompts == self.num_prompts

    def conflicts(self, run: RunConfig) -> tuple[str, ...]:
        return self.said


class Toy:
    Config = ToyConfig
    name = "toy"

    num_nodes = 1
    pins: ClassVar[dict[str, list[int]]] = {}

    def __init__(self, config: ToyConfig, **context: Any) -> None:
        self.passes = config.passes
        self.config = config

    def capacity(self) -> dict[str, tuple[float, str]]:
        return {"num_cpus": (8, "cluster.num_cpus (8)"), "num_gpus": (4, "cluster.num_gpus (4)")}

    def expected(self) -> list[Any]:
        return []

    def check_fits(self, demands: Any) -> None:
        """Has room for all."""

    def compute_logprobs(self) -> None:
        """A policy's trainer has it."""

    def sampling(self, group_size: int) -> str | None:
        return "sampling" if self.config.samples else None

    def __len__(self) -> int:
        return self.config.num_prompts


class ToyCritic(Toy):
    compute_values = None


def critic(**changes: Any) -> RoleConfig:
    trainer = Section("critic.trainer", ToyCritic, ToyConfig(**changes))
    return RoleConfig(section(), trainer)


NO_DEBUG = load(compose_node([])).debug
WITH_VALUES = ("old_logprobs", "values")


def section(**changes: Any) -> Section:
    return Section("toy", Toy, ToyConfig(**changes))


def run_config(**changes: Any) -> RunConfig:
    keys: dict[str, Any] = {
        "run_name": "toy",
        "seed": 1,
        "group_size": 8,
        "train_batch_size": 128,
        "num_steps": None,
        "num_epochs": 2,
        "output_dir": "outputs",
        "resume_from": None,
        "plan": False,
        "trusted_prefixes": [],
        "critic": None,
        "teachers": {},
        "distillation": None,
        "prm": None,
        "objective": None,
        "stop_sweep_on_failure": False,
        "tracking": {},
        "debug": NO_DEBUG,
    }
    groups = RunConfig.__dataclass_fields__.keys() - keys.keys()
    return RunConfig(**{**keys, **{name: section() for name in groups}, **changes})


def problems(config: RunConfig) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check(config)
    return error.value.problems


def test_batch_arithmetic() -> None:
    plan = RunPlan.of(run_config())
    assert plan.prompts_per_step == 16
    assert plan.samples_per_minibatch == 64
    assert plan.samples_per_rank == 32


def test_steps_follow_from_epochs_and_count_whole_batches() -> None:
    plan = RunPlan.of(run_config())
    assert plan.num_steps == 12  # 200 prompts in batches of 16
    assert plan.steps_per_epoch == 6


def test_given_steps_are_taken() -> None:
    assert RunPlan.of(run_config(num_steps=7, num_epochs=None)).num_steps == 7


def test_less_data_than_one_batch_is_an_error() -> None:
    small = run_config(data=section(num_prompts=7))
    with pytest.raises(ConfigError, match=r"num_epochs \(2\) x 7 prompts .* batch of 16 prompts"):
        RunPlan.of(small)


def workers(plan: RunPlan) -> list[tuple[str, str]]:
    return [(bundle.device, bundle.name) for bundle in plan.bundles]


def test_every_rank_has_its_place() -> None:
    plan = RunPlan.of(run_config())
    assert workers(plan) == [
        ("GPU 0", "actor[0]"),
        ("GPU 1", "actor[1]"),
        ("GPU 2", "actor[2]"),
        ("GPU 3", "actor[3]"),
        ("CPU", "engine[0]"),
        ("CPU", "engine[1]"),
        ("CPU", "engine[2]"),
        ("CPU", "rollout[0]"),
    ]
    assert plan.problems == ()


def test_a_reference_runs_only_when_the_algorithm_asks_for_it() -> None:
    asking = section(passes=("old_logprobs", "ref_logprobs"))
    plan = RunPlan.of(run_config(algorithm=asking))
    assert {bundle.role for bundle in plan.bundles} == {"actor", "engine", "rollout"}
    assert list(plan.splits) == ["actor", "reference"]
    assert plan.order == (("old_logprobs: actor", "ref_logprobs: reference"), ("train: actor",))
    assert plan.problems == (
        "cluster.num_gpus (4) is less than the roles need (8: actor 4, reference 4)",
    )


def test_each_role_has_its_share_of_a_batch() -> None:
    asking = section(passes=WITH_VALUES)
    config = run_config(
        algorithm=asking, critic=critic(data_parallel_size=4, num_gpus_per_rank=0.0)
    )
    splits = RunPlan.of(config).splits
    assert splits["actor"] == Split(2, of_batch=64, of_optimizer_step=32)
    assert splits["critic"] == Split(4, of_batch=32, of_optimizer_step=16)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_staleness": 0}, "0 versions"),
        ({"max_staleness": 1}, "up to 1 version"),
        ({"update_weights_interval": 3}, "up to 2 versions, each of 3 steps"),
    ],
)
def test_the_loop_says_how_stale_a_batch_can_be(changes: dict[str, int], said: str) -> None:
    assert RunPlan.of(run_config(loop=section(**changes))).staleness == said


def test_deadlines_are_named_by_key() -> None:
    assert RunPlan.of(run_config()).deadlines_s["engine.start_deadline_s"] == 5.0


def test_a_consistent_run_passes() -> None:
    check(run_config())


NO_ENGINE = {"engine": None, "weight_sync": None, "eval": None}
SUPERVISED = {**NO_ENGINE, "rollout": section(samples=False), "algorithm": section(passes=())}
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"train_batch_size": 96, "group_size": 10, "algorithm": section(num_minibatches=1)},
        "train_batch_size (96) must be a multiple of group_size (10); try 90 or 100",
    ),
    (
        {"algorithm": section(num_minibatches=3), "trainer": section(data_parallel_size=1)},
        "algorithm.num_minibatches (3) must divide the 16 prompts of a batch "
        "(train_batch_size / group_size); try 1 or 2 or 4 or 8 or 16",
    ),
    (
        {"trainer": section(data_parallel_size=3)},
        "the 64 samples of an optimizer step (train_batch_size / algorithm.num_minibatches) must "
        "be a multiple of the trainer's 3 data-parallel ranks; try train_batch_size=96 or 144, "
        "or another number of ranks",
    ),
    (
        {"rollout": section(max_response_tokens=21)},
        "rollout.max_prompt_tokens (10) + rollout.max_response_tokens (21) are more than "
        "model.max_length (30); lower one of them or raise model.max_length",
    ),
    ({"reward": None}, "reward: null, but what Toy samples has to be scored; choose an option"),
    (
        {"rollout": section(samples=False), "algorithm": section(passes=(), num_minibatches=1)},
        "engine: has no effect, as Toy asks no engine; switch it off (~engine)",
    ),
    (
        {"rollout": section(samples=False), **NO_ENGINE},
        "algorithm: Toy compares with the policy that sampled, but Toy samples nothing; choose "
        "algorithm=sft or another rollout",
    ),
    ({**NO_ENGINE}, "engine: null, but Toy samples from engines; choose an option"),
    (
        {"weight_sync": None},
        "weight_sync: null, but engines would keep their first weights; choose an option",
    ),
    (
        {**SUPERVISED, "weight_sync": section()},
        "weight_sync: has no effect without engines; switch it off (~weight_sync)",
    ),
    (
        {**SUPERVISED, "eval": section()},
        "eval: needs engines to answer its prompts; switch it off (~eval)",
    ),
    ({"loop": section(said=("loop.colocate: no",))}, "loop.colocate: no"),
]


@pytest.mark.parametrize(
    ("changes", "line"), CONTRADICTIONS, ids=[x[:30] for _, x in CONTRADICTIONS]
)
def test_a_contradiction_is_explained(changes: dict[str, Any], line: str) -> None:
    assert problems(run_config(**changes)) == [line]


def test_a_missing_model_folder_is_named() -> None:
    assert problems(run_config(model=section(path="./nowhere")))[0].startswith(
        "model.path: there is no folder './nowhere'"
    )


def test_all_contradictions_are_reported_at_once() -> None:
    config = replace(run_config(), train_batch_size=100, resume_from="./nowhere")
    assert len(problems(config)) >= 2


@pytest.mark.parametrize("steps", [(None, None), (3, 1)])
def test_exactly_one_of_steps_and_epochs(steps: tuple[int | None, int | None]) -> None:
    with pytest.raises(ValueError, match="exactly one of num_steps"):
        run_config(num_steps=steps[0], num_epochs=steps[1])


def test_values_and_a_critic_go_together() -> None:
    asking = section(passes=WITH_VALUES)
    check(run_config(algorithm=asking, critic=critic()))
    assert problems(run_config(algorithm=asking)) == [
        "critic: null, but Toy needs values; choose an option (critic=megatron)"
    ]
    assert problems(run_config(critic=critic())) == [
        "critic: has no effect, as Toy reads no values; switch it off (~critic) or choose "
        "algorithm=ppo"
    ]


def test_a_critic_has_ranks_that_compute_values_and_share_evenly() -> None:
    asking = section(passes=WITH_VALUES)
    found = problems(run_config(algorithm=asking, critic=RoleConfig(section(), section())))
    assert "choose trainer@critic.trainer=megatron_critic" in found[0]
    (found,) = problems(run_config(algorithm=asking, critic=critic(data_parallel_size=3)))
    assert "must be a multiple of the critic's 3 data-parallel ranks" in found


def test_critic_only_steps_are_whole_intervals_of_updates() -> None:
    algorithm = section(passes=WITH_VALUES, num_critic_only_steps=5)
    loop = section(update_weights_interval=2)
    (found,) = problems(run_config(algorithm=algorithm, critic=critic(), loop=loop))
    assert found.endswith("multiple of loop.update_weights_interval (2); try 4 or 6")
