"""Small random models in place of those of a recipe: same architecture and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from rlpost.errors import ModelError
from rlpost.models.shape import shape_of
from rlpost.models.small import prepare_small, settings_when_small, small_classifier, small_copy
from rlpost.models.tiny import TinyModel, TinyModelConfig
from rlpost.models.warm_start import WarmStartedModel, WarmStartedModelConfig


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    config = TinyModelConfig(
        num_layers=3,
        hidden_size=96,
        intermediate_size=160,
        num_heads=3,
        num_key_value_heads=3,
        initializer_range=0.02,
        characters="0123456789+-=",
        vocab_multiple=32,
        model_seed=1,
        dtype="float32",
        max_length=64,
    )
    return TinyModel(config).prepare(tmp_path_factory.mktemp("large"))


def settings(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_a_small_copy_keeps_architecture_and_tokenizer_and_takes_no_weights(large, tmp_path):
    without = tmp_path / "hub"
    without.mkdir()
    for file in large.iterdir():
        if file.suffix != ".safetensors":
            (without / file.name).write_bytes(file.read_bytes())
    state = torch.random.get_rng_state()
    folder = small_copy(without, tmp_path / "models")
    assert torch.equal(state, torch.random.get_rng_state())
    assert small_copy(without, tmp_path / "models") == folder
    assert settings(folder)["architectures"] == settings(large)["architectures"]
    assert settings(folder)["num_hidden_layers"] == 2
    assert settings(folder)["vocab_size"] == settings(large)["vocab_size"]
    one, other = (transformers.AutoTokenizer.from_pretrained(path) for path in (large, folder))
    assert one("7+5=").input_ids == other("7+5=").input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert sum(weight.numel() for weight in model.parameters()) < 200_000


def warm_started(recipe, overrides=()) -> WarmStartedModel:
    return WarmStartedModel(WarmStartedModelConfig(recipe, list(overrides), 1.0, "float32", 128))


def test_a_warm_started_model_is_what_its_training_begins_with(tmp_path):
    def small(recipe, overrides=()):
        return prepare_small(warm_started(recipe, overrides), tmp_path)

    assert small("sft_chain").name.startswith("tiny-")
    teacher = small("sft_chain", ["model.num_layers=3"])
    assert settings(teacher)["num_hidden_layers"] == 3
    classifier = settings(small("prm_train"))
    assert classifier["architectures"] == ["Qwen3ForTokenClassification"]


@pytest.mark.parametrize("overrides", [["model.num_layers=3"], ["model=smollm2_135m"]])
def test_the_sizes_of_a_small_model_are_known_before_it_is_there(overrides, tmp_path):
    model = warm_started("sft_chain", overrides)
    planned, there = settings_when_small(model), settings(prepare_small(model, tmp_path))
    assert planned is not None
    assert shape_of(planned) == shape_of(there)


def test_a_classifier_has_two_labels(large, tmp_path):
    folder = small_classifier(large, tmp_path)
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder)
    assert model.num_labels == 2


def test_an_unknown_architecture_is_named(large, tmp_path):
    odd = tmp_path / "odd"
    odd.mkdir()
    changed = {**settings(large), "architectures": ["OddForCausalLM"]}
    (odd / "config.json").write_text(json.dumps(changed))
    with pytest.raises(
        ModelError, match=r"architectures \['OddForCausalLM'\] names no known class"
    ):
        small_copy(odd, tmp_path / "models")
