"""What every trainer promises, and that each conf/trainer option keeps it."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from integration import megatron_models
from safetensors.torch import load_file
from trainer_ranks import CONF, Ranks, grpo, rollouts, trainer_config, view_of, with_passes

from rlpost.cluster.rendezvous import Rendezvous
from rlpost.errors import CheckpointError, ConfigError, ModelError, TrainerError
from rlpost.fingerprint import fingerprint
from rlpost.trainers.base import CriticRank, RankSpec, RoleRank, TrainerRank
from rlpost.trainers.megatron.rank import MegatronRank
from rlpost.weight_sync.object_store import to_store

OPTIONS = sorted((CONF / "trainer").glob("*.yaml"))
NOWHERE = Rendezvous("127.0.0.1", 1, -1)  # a rank that is refused meets nobody
SHARES = [[list(range(12))]]
# What the composition root, the plan and the driver read from a trainer's Config.
SHARED_KEYS = {
    *("data_parallel_size", "num_cpus_per_rank", "num_gpus_per_rank"),
    *("setup_deadline_s", "step_deadline_s"),
}


def target(option: Path) -> Any:
    module, _, name = yaml.safe_load(option.read_text())["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def contract(option: Path) -> Any:
    """A classifier of steps takes no part in passes: it is a rank and no more."""
    if getattr(target(option), "classifies", False):
        return RoleRank
    return CriticRank if hasattr(target(option), "compute_values") else TrainerRank


def methods(protocol: Any) -> list[str]:
    return [name for name, _ in inspect.getmembers(protocol, inspect.isfunction) if name[0] != "_"]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.stem)
def test_every_option_has_the_methods_of_its_contract(option: Path) -> None:
    for method in methods(contract(option)):
        found = inspect.signature(getattr(target(option), method))
        promised = inspect.signature(getattr(contract(option), method))
        assert list(found.parameters) == list(promised.parameters), method


def test_a_policy_is_no_critic() -> None:
    assert {contract(option) for option in OPTIONS} == {CriticRank, RoleRank, TrainerRank}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.stem)
def test_every_config_says_what_a_run_needs_to_place_it(option: Path) -> None:
    config = target(option).Config
    assert set(config.__dataclass_fields__) >= SHARED_KEYS
    assert isinstance(config.world_size, property)
    assert isinstance(config.env, property)


def rank_of(world_size: int, **sizes: int) -> MegatronRank:
    return MegatronRank(
        trainer_config(**sizes),
        spec=RankSpec("actor", 0, world_size, NOWHERE),
        model_path="none",
        dtype="float32",
        algorithm=None,
        temperature=1.0,
        seed=1,
    )


def test_use_before_setup_is_an_error() -> None:
    with pytest.raises(TrainerError, match=r"actor\[0\] was used before setup"):
        rank_of(1).parameters_hash()


def test_ranks_and_layout_must_agree() -> None:
    with pytest.raises(TrainerError, match=r"started with 3 ranks, but .* is 4"):
        rank_of(3, tp=2, dp=2).setup()


def test_a_rate_that_decays_upwards_is_refused() -> None:
    config = trainer_config()
    schedule = type(config.lr_schedule)("linear", 0, 10, min_lr=1.0)
    with pytest.raises(ValueError, match=r"min_lr \(1\) is above optimizer.lr \(0.001\)"):
        trainer_config(lr_schedule=schedule)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return megatron_models.write(tmp_path_factory.mktemp("models"), "qwen2")


@pytest.fixture(scope="module")
def ranks(model: Path) -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.fixture
def actor(ranks: Ranks, model: Path) -> Ranks:
    ranks.start(trainer_config(), model=model, algorithm=grpo())
    return ranks


def only(results: list[Any]) -> Any:
    (result,) = results
    return result


@pytest.mark.slow
def test_set_up_reports_its_phases_and_memory(ranks: Ranks, model: Path) -> None:
    phases = only(ranks.start(trainer_config(), model=model, algorithm=None))
    assert set(phases) == {"import", "join", "build"}
    memory = only(ranks.call("memory"))
    assert memory["rss_bytes"] > 1e8 and memory["pss_bytes"] > 1e7
    assert memory["weights_bytes"] > 0 and "optimizer_bytes" not in memory  # it is not trained


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_weights_are_those_of_the_model_folder(
    actor: Ranks, model: Path, dtype: str
) -> None:
    expected = load_file(model / "model.safetensors")
    names = []
    for chunk in only(actor.call("export_weights", dtype, to_store)):
        assert chunk.buffer.dtype == "uint8"
        for spec in chunk.specs:
            wanted = expected[spec.name].to(getattr(torch, dtype))
            raw = torch.from_numpy(chunk.buffer[spec.offset :].copy())[: wanted.nbytes]
            assert torch.equal(raw.view(wanted.dtype).reshape(spec.shape), wanted)
            assert spec.dtype == dtype
            assert chunk.fingerprints[spec.name] == fingerprint(wanted)
            names.append(spec.name)
    assert sorted(names) == sorted(expected)


@pytest.mark.slow
def test_a_saved_folder_equals_the_one_it_was_loaded_from(
    actor: Ranks, model: Path, tmp_path: Path
) -> None:
    actor.call("save_hf", str(tmp_path / "copy"))
    saved = load_file(tmp_path / "copy" / "model.safetensors")
    for name, tensor in load_file(model / "model.safetensors").items():
        assert torch.equal(saved[name], tensor)


@pytest.mark.slow
def test_offloading_and_back_changes_nothing(actor: Ranks) -> None:
    before = actor.call("parameters_hash")
    actor.call("offload")
    actor.call("onload")
    assert actor.call("parameters_hash") == before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_restores_every_bit(ranks: Ranks, model: Path, tmp_path: Path, dtype: str) -> None:
    """Also before the first step, when torch's optimizer would have no state yet."""
    block = rollouts(seed=0)
    ranks.start(trainer_config(), model=model, algorithm=grpo(), dtype=dtype)
    view = with_passes(ranks, block, SHARES)
    for index in range(3):
        ranks.call("save", str(tmp_path / str(index)))
        trained = ranks.call("train", view), ranks.call("parameters_hash")
        ranks.start(trainer_config(), model=model, algorithm=grpo(), dtype=dtype)
        ranks.call("load", str(tmp_path / str(index)))
        again = ranks.call("train", view), ranks.call("parameters_hash")
        assert again[1] == trained[1]
        assert again[0][0].metrics == trained[0][0].metrics
        assert math.isfinite(again[0][0].metrics["train/grad_norm"].result())


@pytest.mark.slow
def test_missing_and_damaged_state_is_refused(actor: Ranks, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no trainer state"):
        actor.call("load", str(tmp_path / "none"))
    actor.call("save", str(tmp_path / "state"))
    for file in (tmp_path / "state").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="can't be loaded"):
        actor.call("load", str(tmp_path / "state"))


@pytest.mark.slow
def test_a_reference_computes_the_same_log_probs_as_the_actor(ranks: Ranks, model: Path) -> None:
    view = view_of(rollouts(seed=0), SHARES)
    ranks.start(trainer_config(), model=model, algorithm=grpo())
    actor = only(ranks.call("compute_logprobs", view, "old_logprobs"))
    ranks.start(trainer_config(), model=model, algorithm=None)
    reference = only(ranks.call("compute_logprobs", view, "ref_logprobs"))
    blocks = actor.block.ref.tokens["old_logprobs"], reference.block.ref.tokens["ref_logprobs"]
    torch.testing.assert_close(*map(torch.from_numpy, blocks), rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_wrong_options_and_folders_are_refused(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    wrong = trainer_config(megatron={"recompute_granularty": "full"})
    with pytest.raises(ConfigError, match="did you mean 'recompute_granularity'"):
        ranks.start(wrong, model=model, algorithm=None)
    with pytest.raises(ModelError, match=r"no config.json"):
        ranks.start(trainer_config(), model=tmp_path, algorithm=None)
