"""What ranks and engines allocate, by arithmetic, against counts by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine_rig import engine_config
from trainer_ranks import trainer_config

from rlpost.engines.memory import EngineTask, kv_cache_tokens
from rlpost.memory import MIB
from rlpost.models.shape import Cut, ModelShape
from rlpost.trainers.base import RankTask

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=16,
    intermediate_size=32,
    num_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=100,
    tied=False,
    qkv_bias=False,
    projection_bias=False,
    mlp_bias=False,
    head_norms=False,
)
LAYER = 16 * (16 + 2 * 8) + 16 * 16 + 3 * 16 * 32 + 2 * 16
WHOLE = 2 * LAYER + 2 * 100 * 16 + 16
TASK = RankTask(
    shape=SHAPE,
    dtype="float32",
    rank=0,
    trained=True,
    longest_tokens=10,
    num_samples=4,
    teacher=None,
    exports=False,
)


def parts(task: RankTask = TASK, head: Any = "logits", **config: Any) -> dict[str, int]:
    return dict(trainer_config(**config).memory(task, head).parts)


def test_a_trained_rank_holds_weights_gradients_and_two_moments() -> None:
    found = parts()
    assert found["weights"] == found["gradients"] == 4 * WHOLE
    assert found["optimizer"] == 8 * WHOLE


def test_bfloat16_adds_a_copy_of_the_weights_to_the_optimizer() -> None:
    found = parts(replace(TASK, dtype="bfloat16"), dp=2)
    assert (found["weights"], found["gradients"]) == (2 * WHOLE, 4 * WHOLE)
    assert found["optimizer"] == 12 * WHOLE // 2


def test_a_frozen_rank_holds_weights_only() -> None:
    found = parts(replace(TASK, trained=False))
    assert set(found) == {"weights", "activations", "logits"}
    assert found["activations"] < parts()["activations"]


def test_a_teacher_in_the_rank_is_held_beside_the_model() -> None:
    assert parts(replace(TASK, teacher=SHAPE))["weights"] == 2 * 4 * WHOLE


def test_ranks_hold_their_cut_of_the_model() -> None:
    halves = LAYER - 2 * 16
    assert SHAPE.num_parameters(cut=Cut(tp=2)) == halves + 2 * 2 * 16 + 100 * 16 + 16
    assert parts(tp=2)["weights"] == 4 * SHAPE.num_parameters(cut=Cut(tp=2))
    first, last = (parts(replace(TASK, rank=rank), pp=2) for rank in (0, 1))
    assert first["weights"] == 4 * (LAYER + 100 * 16)
    assert last["weights"] == 4 * (LAYER + 16 + 100 * 16)
    assert "logits" not in first and first["activations"] == 2 * last["activations"]


def test_the_first_data_parallel_rank_gathers_a_checkpoint_on_the_host() -> None:
    config = trainer_config(tp=2, dp=2, num_gpus_per_rank=1.0)
    ranks = [config.memory(replace(TASK, rank=rank), "logits") for rank in range(4)]
    assert ["save" in rank.host_parts for rank in ranks] == [True, True, False, False]
    assert all("save" not in rank.parts and rank.on_gpu for rank in ranks)
    frozen = config.memory(replace(TASK, trained=False), "logits")
    assert "save" not in frozen.host_parts


def test_a_value_head_has_no_vocabulary() -> None:
    found = parts(head="value")
    assert found["weights"] == 4 * (WHOLE - 100 * 16 + 17)
    assert "logits" not in found


def test_padding_rows_of_the_vocabulary_are_held() -> None:
    padded = parts(make_vocab_size_divisible_by=128)
    assert padded["weights"] == 4 * (WHOLE + 2 * 28 * 16)


def test_activations_grow_with_the_tokens_of_a_micro_batch() -> None:
    few, many = (parts(replace(TASK, num_samples=count))["activations"] for count in (1, 4))
    assert many == 4 * few
    assert parts(micro_batch_tokens=20)["activations"] == 2 * few
    options = {"recompute_granularity": "full"}
    assert parts(megatron=options)["activations"] < many


CACHE: dict[str, Any] = {"vllm": {"kv_cache_memory_bytes": 64 * MIB}}


def test_an_engine_holds_weights_and_the_cache_it_was_given() -> None:
    task = EngineTask(SHAPE, "float32", 32, "logits", device_bytes=None)
    found = engine_config(**CACHE).memory(task)
    assert found.certain_bytes == 4 * WHOLE + 64 * MIB
    assert found.parts["packed"] == 4 * (WHOLE - 100 * 16)  # all but the table of embeddings
    # keys and values of 2 layers, 2 heads of 4 in float32: 128 bytes a token
    assert kv_cache_tokens(engine_config(**CACHE), task, 64 * MIB) == 64 * MIB // 128


def test_an_engine_on_a_gpu_takes_its_share_of_it() -> None:
    task = EngineTask(SHAPE, "bfloat16", 32, "logits", device_bytes=8192 * MIB)
    config = engine_config(num_gpus_per_engine=1.0, vllm={"gpu_memory_utilization": 0.5})
    assert config.memory(task).device_bytes == 4096 * MIB
    unknown = config.memory(replace(task, device_bytes=None))
    assert "kv_cache" not in unknown.parts
