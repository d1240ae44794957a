"""What the model folder and the user's options may say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from rlpost.errors import ConfigError, ModelError

pytestmark = pytest.mark.slow

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def resolve(hf_config: Any = None, *, tp: int = 1, pp: int = 1, **options: Any) -> Any:
    from rlpost.trainers.megatron.model_config import transformer_config

    hf_config = hf_config or transformers.LlamaConfig(**LLAMA)
    return transformer_config(hf_config, dtype=torch.float32, options=options, tp=tp, pp=pp)


def test_options_reach_megatron_verbatim() -> None:
    options = {"recompute_granularity": "full", "recompute_method": "uniform"}
    config = resolve(**options, recompute_num_layers=1)
    assert {key: getattr(config, key) for key in options} == options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recompute_granulatiry": "full"}, "did you mean 'recompute_granularity'"),
        ({"hidden_size": 32}, "follows from the model"),
        ({"attention_dropout": 0.1}, "remove it"),
        ({"recompute_granularity": "half"}, "Megatron refuses options"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(**options)


def test_all_bad_options_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(tp=3, pp=5, no_such_option=1)
    assert len(raised.value.problems) == 4


def test_sizes_that_ranks_cannot_share_name_a_size_that_works() -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_parallel \(3\).*num_attention_heads \(4\); try 2"
    ):
        resolve(tp=3)


def test_experts_under_tensor_parallelism_need_sequence_parallelism() -> None:
    moe = transformers.Qwen3MoeConfig(**LLAMA, num_experts=4, num_experts_per_tok=2)
    with pytest.raises(ConfigError, match="sequence_parallel: true"):
        resolve(moe, tp=2)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters.rope_type = 'linear'.*only 'default' or 'llama3' is",
        ),
        ({"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 2.0}}, "low_freq_factor = 2.0"),
        ({"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 8.0}}, "high_freq_factor = 8.0"),
        (
            {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 4096}},
            r"original_max_position_embeddings = 4096.*only 8192 is",
        ),
    ],
)
def test_unsupported_model_features_are_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelError, match=key):
        resolve(transformers.LlamaConfig(**LLAMA, **changes))


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(ModelError, match="use_sliding_window = True"):
        resolve(transformers.Qwen2Config(**LLAMA, use_sliding_window=True))


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="'gpt2' is not supported; choose from llama, qwen2"):
        resolve(transformers.GPT2Config())
