"""Validation of nodes against toy classes: what is accepted, and the line each mistake gets."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, Literal

import pytest
from pydantic import PositiveFloat, PositiveInt

from rlpost.config import Section, build, to_plain
from rlpost.validation import Validator


@dataclass(frozen=True)
class PartConfig:
    weight: float


class Part:
    Config = PartConfig

    def __init__(self, config: PartConfig, *, scale: float = 1.0) -> None:
        self.value = config.weight * scale


@dataclass(frozen=True)
class Optimizer:
    lr: PositiveFloat
    kind: Literal["adam", "sgd"]
    betas: list[float]


@dataclass(frozen=True)
class WholeConfig:
    optimizer: Optimizer
    num_parts: PositiveInt | None
    parts: dict[str, Section]

    def __post_init__(self) -> None:
        if self.num_parts not in (None, len(self.parts)):
            raise ValueError(f"num_parts ({self.num_parts}) must be {len(self.parts)} or null")


class Whole:
    Config = WholeConfig


@dataclass(frozen=True)
class Root:
    whole: Section
    seed: int


class Bare:
    """Has no Config."""


def node(**changes: Any) -> dict[str, Any]:
    """A correct `whole` node with some keys replaced."""
    correct = {
        "_target_": f"{__name__}.Whole",
        "optimizer": {"lr": 1e-5, "kind": "adam", "betas": [0.9, 1]},
        "num_parts": None,
        "parts": {"a": {"_target_": f"{__name__}.Part", "weight": 2}},
    }
    return {**correct, **changes}


def problems(whole: Any, **root: Any) -> list[str]:
    validator = Validator([f"{__name__}."])
    assert validator.validate(Root, {"whole": whole, "seed": 1, **root}) is None
    return validator.problems


def valid_root() -> Root:
    validator = Validator([f"{__name__}."])
    root = validator.validate(Root, {"whole": node(), "seed": 1})
    assert validator.problems == []
    assert isinstance(root, Root)
    return root


def test_a_correct_node_becomes_frozen_configs_with_nested_sections() -> None:
    whole = valid_root().whole.config
    assert whole.optimizer == Optimizer(1e-5, "adam", [0.9, 1.0])
    assert whole.parts["a"] == Section("whole.parts.a", Part, PartConfig(2.0))
    with pytest.raises(FrozenInstanceError):
        whole.optimizer.lr = 1.0


def test_build_passes_the_config_and_the_context() -> None:
    assert build(valid_root().whole.config.parts["a"], scale=3.0).value == 6.0


def test_plain_values_validate_to_the_same_configuration() -> None:
    root = valid_root()
    plain = to_plain(root)
    assert plain["whole"]["parts"]["a"]["_target_"] == f"{__name__}.Part"
    assert Validator([f"{__name__}."]).validate(Root, plain) == root


def test_a_configuration_can_be_sent_to_another_process() -> None:
    root = valid_root()
    assert pickle.loads(pickle.dumps(root)) == root


OPTIMIZER = {"lr": 1e-5, "kind": "adam", "betas": [0.9]}
MISTAKES = [
    (
        node(optimizer={**OPTIMIZER, "lr": "1e-5"}),
        "whole.optimizer.lr: got '1e-5'; allowed: number > 0; it is a string: remove the quotes",
    ),
    (node(optimizer={**OPTIMIZER, "lr": -1}), "whole.optimizer.lr: got -1; allowed: number > 0"),
    (
        node(optimizer={**OPTIMIZER, "kind": "adm"}),
        "whole.optimizer.kind: got 'adm'; allowed: 'adam' or 'sgd'; did you mean 'adam'?",
    ),
    (
        node(optimizer={**OPTIMIZER, "betas": [0.9, "x"]}),
        "whole.optimizer.betas.1: got 'x'; allowed: number",
    ),
    (
        node(optimizer={**OPTIMIZER, "bets": 1}),
        "whole.optimizer.bets: unknown key; did you mean 'betas'?; valid here: lr, kind, betas",
    ),
    (
        node(optimizer={"lr": 1.0, "kind": "sgd"}),
        "whole.optimizer.betas: missing; allowed: list of number",
    ),
    (node(num_parts=2.0), "whole.num_parts: got 2.0; allowed: integer > 0 or null"),
    (node(num_parts=True), "whole.num_parts: got True; allowed: integer > 0 or null"),
    (node(num_parts=2), "whole: num_parts (2) must be 1 or null"),
    (
        node(parts={"a": {"_target_": f"{__name__}.Part", "weight": None}}),
        "whole.parts.a.weight: got None; allowed: number",
    ),
    (node(parts={"a": 3}), "whole.parts.a: got 3; a node with _target_ belongs here"),
    (
        node(_target_=f"{__name__}.Whol"),
        f"whole._target_: got '{__name__}.Whol'; module {__name__} has no 'Whol'; "
        "did you mean 'Whole'?",
    ),
    (
        node(_target_="os.system"),
        f"whole._target_: got 'os.system'; must start with one of ['{__name__}.'] "
        "(see trusted_prefixes)",
    ),
    (
        node(_target_=f"{__name__}.Bare"),
        f"whole._target_: got '{__name__}.Bare'; the class has no `Config` dataclass, "
        "so it can't stand here",
    ),
]


@pytest.mark.parametrize(("whole", "line"), MISTAKES, ids=[line[:40] for _, line in MISTAKES])
def test_a_mistake_gets_one_line_with_key_value_and_way_out(whole: Any, line: str) -> None:
    assert problems(whole) == [line]


def test_all_mistakes_are_reported_at_once() -> None:
    whole = node(optimizer={"lr": 0, "kind": 1, "betas": 2}, parts={"a": {"_target_": "x.Y"}})
    assert [line.split(":")[0] for line in problems(whole, sed=1)] == [
        "whole.parts.a._target_",
        "whole.optimizer.lr",
        "whole.optimizer.kind",
        "whole.optimizer.betas",
        "sed",
    ]


def test_a_module_that_does_not_exist_is_named() -> None:
    validator = Validator(["rlpost."])
    validator.validate(Root, {"whole": {"_target_": "rlpost.rewardz.Exact"}, "seed": 1})
    assert "can't import module rlpost.rewardz" in validator.problems[0]


def test_an_invariant_that_looks_into_a_broken_part_does_not_hide_its_problem() -> None:
    part = {"_target_": f"{__name__}.Part", "weight": "x"}
    validator = Validator([f"{__name__}."])
    assert validator.validate(NosyConfig, {"part": part}) is None
    assert validator.problems == ["part.weight: got 'x'; allowed: number"]


@dataclass(frozen=True)
class NosyConfig:
    part: Section

    def __post_init__(self) -> None:
        if self.part.config.weight < 0:
            raise ValueError("weight must not be negative")
