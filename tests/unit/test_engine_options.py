"""What an engine's configuration refuses, and the environment it asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_rig import engine_config

from rlpost.engines.requests import stop_token_ids
from rlpost.engines.serving import Served
from rlpost.engines.weight_set import whole_fingerprints
from rlpost.errors import EngineError, WeightSyncError


@pytest.mark.parametrize("key", ["seed", "logprobs_mode", "enable_lora", "model"])
def test_options_of_rlpost_are_refused_with_a_reason(key: str) -> None:
    with pytest.raises(ValueError, match=rf"engine\.vllm\.{key} \(.+\)"):
        engine_config(vllm={key: 1})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("kv_cache_memory_bytes", "10GiB", r"\('10GiB'\) must be a number above 0"),
        ("max_num_seqs", 0, r"\(0\) must be a number above 0"),
        ("gpu_memory_utilization", 90, r"\(90\) must be a number above 0 and at most 1"),
    ],
)
def test_options_that_the_plan_counts_with_are_numbers(key: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=rf"engine\.vllm\.{key} {said}"):
        engine_config(vllm={key: value})
    assert engine_config(vllm={key: None}).vllm == {key: None}


def test_one_process_cannot_hold_two_ranks() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 2; use async_llm or auto"):
        engine_config(process_layout="in_process", tensor_parallel_size=2)


def test_a_gpu_engine_gets_no_cpu_settings() -> None:
    on_gpu = engine_config(num_gpus_per_engine=1.0)
    assert on_gpu.layout == "async_llm" and engine_config().layout == "in_process"
    cpu_only = set(engine_config().env) - set(on_gpu.env)
    assert {"TORCH_COMPILE_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"} <= cpu_only
    inside = engine_config(num_gpus_per_engine=1.0, process_layout="in_process")
    assert inside.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_an_engine_of_one_rank_may_have_a_share_of_a_gpu() -> None:
    assert engine_config(num_gpus_per_engine=0.5).layout == "async_llm"
    for ranks, num_gpus in ((1, 1.5), (2, 0.5), (2, 1.0)):
        with pytest.raises(ValueError, match=r"with tensor_parallel_size 1 it may be a share"):
            engine_config(num_gpus_per_engine=num_gpus, tensor_parallel_size=ranks)


def test_stop_tokens_come_from_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert stop_token_ids(str(tmp_path)) == [2]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert stop_token_ids(str(tmp_path)) == [3, 7]


def test_a_model_that_could_never_stop_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="names no eos_token_id"):
        stop_token_ids(str(tmp_path))


def test_parts_of_ranks_add_up_and_copies_count_once() -> None:
    ranks = [{"w": (0, 5), "norm": (0, 9)}, {"w": (32, 6), "norm": (0, 9)}]
    assert whole_fingerprints("engine[0]", ["w", "norm"], ranks) == {"w": 11, "norm": 9}


def test_unequal_copies_are_an_error() -> None:
    with pytest.raises(WeightSyncError, match="different copies of norm"):
        whole_fingerprints("engine[0]", ["norm"], [{"norm": (0, 9)}, {"norm": (0, 8)}])


def test_an_engine_of_the_judge_names_its_own_settings() -> None:
    served = Served("prm", 1, "folder", "float32", 64, 0)
    assert (served.name, served.section) == ("prm[1]", "prm.engine")
