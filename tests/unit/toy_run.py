"""A run whose sections all have the same class: just the attributes that plan and checks read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rlpost.composition import compose_node
from rlpost.config import RoleConfig, RunConfig, Section, load


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
