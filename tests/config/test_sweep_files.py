"""Every file under conf/sweep: what it varies exists, and each job's value is a valid one."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from rlpost.composition import CONF
from rlpost.config import load_sweep
from rlpost.overrides import CommandLine

FILES = sorted((CONF / "sweep").glob("*.yaml"))


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_a_sweep_starts_as_one_and_varies_what_is_there(name: str) -> None:
    text = (CONF / "sweep" / f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    node = OmegaConf.create(text)
    assert node.hydra.mode == "MULTIRUN", "else a forgotten -m would start a single run"
    varied = [f"{key}={value}" for key, value in node.hydra.sweeper.params.items()]
    assert CommandLine(["-m", "recipe=grpo_chain", *varied]).problems == []
    parsed = OverridesParser.create().parse_overrides(varied)
    assert all(override.is_sweep_override() for override in parsed)


def test_a_sweep_reads_its_own_keys_though_others_have_no_value_yet() -> None:
    node = OmegaConf.create(
        {
            "run_name": "x",
            "plan": False,
            "objective": {"metric": "train/loss", "direction": "minimize", "reduce": "best"},
            "trusted_prefixes": ["rlpost."],
            "model": {"path": "???"},
        }
    )
    settings = load_sweep(node)
    assert settings.objective is not None and settings.objective.direction == "minimize"
    assert settings.tracking == {}
