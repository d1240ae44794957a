"""Parameters counted by arithmetic are those that transformers makes, for every family."""

from __future__ import annotations

import json
from typing import Any

import megatron_models
import pytest
import torch
import transformers

from rlpost.models import smollm2
from rlpost.models.shape import Cut, ModelShape, shape_of
from rlpost.models.tiny import TinyModel, TinyModelConfig
from rlpost.overrides import compose_node

COMMON = {**megatron_models._COMMON, "num_hidden_layers": 4}
EXPERTS = {**megatron_models._MOE, "head_dim": 32}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"tie_word_embeddings": True}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None}),
    ("Qwen2", {"tie_word_embeddings": False}),
    ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    ("Qwen3", {"attention_bias": True, "head_dim": 16}),
    ("Qwen3Moe", EXPERTS),
    ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [1]}),
    ("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 2}),
]


def real(family: str, settings: dict[str, Any], kind: str) -> tuple[int, ModelShape]:
    """(parameters of the transformers model, the shape read from its config.json)"""
    config = getattr(transformers, f"{family}Config")(**COMMON | settings)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}For{kind}")(config)
    shape = shape_of(json.loads(config.to_json_string()))
    assert shape is not None
    return sum(parameter.numel() for parameter in model.parameters()), shape


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_parameters_are_counted_as_they_are(family: str, settings: dict[str, Any]) -> None:
    count, shape = real(family, settings, "CausalLM")
    assert shape.num_parameters() == count
    count, shape = real(family, settings, "TokenClassification")
    assert shape.num_parameters("labels") == count
    hidden = shape.hidden_size
    assert shape.num_parameters("value") == count - (hidden + 1)  # one output in place of two


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_the_stages_of_a_pipeline_hold_the_model_once(
    family: str, settings: dict[str, Any]
) -> None:
    count, shape = real(family, settings, "CausalLM")
    whole = sum(shape.num_parameters(cut=Cut(pp=2, stage=stage)) for stage in range(2))
    copied = shape.vocab_size * shape.hidden_size if shape.tied else 0
    assert whole == count + copied  # the last stage has a copy of a tied embedding


def test_models_say_the_sizes_that_they_will_have() -> None:
    node = compose_node(["model=tiny_init"]).model
    tiny = TinyModel(TinyModelConfig(**{k: v for k, v in node.items() if k != "_target_"}))
    for settings, family in ((tiny.settings(), "Qwen3"), (smollm2.SIZES, "Llama")):
        kept = {name: value for name, value in settings.items() if name != "model_type"}
        with torch.device("meta"):
            config = getattr(transformers, f"{family}Config")(**kept)
            model = getattr(transformers, f"{family}ForCausalLM")(config)
        shape = shape_of(settings)
        assert shape is not None
        assert shape.num_parameters() == sum(p.numel() for p in model.parameters())
