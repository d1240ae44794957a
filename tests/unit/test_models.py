import multiprocessing
import os
import time
from pathlib import Path

import pytest
import yaml

from rlpost.errors import ModelError
from rlpost.models.cache import build_once, key_of, sibling
from rlpost.models.folder import checked
from rlpost.models.hugging_face import HuggingFaceModel, HuggingFaceModelConfig
from rlpost.models.tiny import TinyModel, TinyModelConfig

ROOT = Path(__file__).parents[2]
TEXT = "7+5-2=7+5=12\n12-2=10\n10"


def tiny(**changes) -> TinyModel:
    values = yaml.safe_load((ROOT / "conf/model/tiny_init.yaml").read_text())
    del values["_target_"]
    return TinyModel(TinyModelConfig(**(values | changes)))


def hub(path: str, **changes) -> HuggingFaceModel:
    values = {"path": path, "revision": "main", "dtype": "float32", "max_length": 128}
    return HuggingFaceModel(HuggingFaceModelConfig(**(values | changes)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny().prepare(tmp_path_factory.mktemp("models"))


def test_a_model_is_saved_without_a_progress_bar(tmp_path, capfd):
    tiny().prepare(tmp_path)
    assert capfd.readouterr().err == ""


def test_auto_tokenizer_gives_one_token_per_character_and_decodes_them_back(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT).input_ids
    assert len(ids) == len(TEXT) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == TEXT
    assert tokenizer("x").input_ids == [tokenizer.unk_token_id]


def test_every_id_the_tiny_model_can_emit_is_a_token(folder):
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert config.vocab_size == len(tokenizer) == 32
    assert config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode([31], skip_special_tokens=True) == ""


def test_same_seed_gives_same_weights_and_leaves_the_global_rng_alone(folder, tmp_path):
    import torch

    state = torch.get_rng_state()
    again = tiny().prepare(tmp_path)
    assert torch.equal(state, torch.get_rng_state())
    assert again.name == folder.name
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, again)]
    assert weights[0] == weights[1]
    other = tiny(model_seed=2).prepare(tmp_path)
    assert other != again and (other / "model.safetensors").read_bytes() != weights[0]


def test_tiny_model_refuses_heads_that_do_not_divide():
    with pytest.raises(ValueError, match=r"hidden_size \(256\) .* num_heads \(5\)"):
        tiny(num_heads=5)
    with pytest.raises(ValueError, match=r"num_key_value_heads \(3\)"):
        tiny(num_key_value_heads=3)
    with pytest.raises(ValueError, match="more than once"):
        tiny(characters="0120")


def test_a_local_folder_is_taken_as_it_is(folder, tmp_path):
    assert hub(str(folder)).prepare(tmp_path) == folder
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_named_in_full(tmp_path):
    with pytest.raises(ModelError, match=f"there is no folder {tmp_path}/absent"):
        hub(str(tmp_path / "absent")).prepare(tmp_path)


def test_an_unreachable_hub_model_says_where_it_looked_and_what_to_do(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        hub("owner/absent").prepare(tmp_path)
    message = str(caught.value)
    assert f"{tmp_path}/owner/absent" in message and constants.HF_HUB_CACHE in message
    assert "HF_HUB_OFFLINE is set" in message


def test_a_malformed_hub_name_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="Repo id must use alphanumeric"):
        hub("a b").prepare(tmp_path)


def test_a_max_length_beyond_the_positions_names_the_limit(folder, tmp_path):
    with pytest.raises(ModelError, match=r"max_length \(129\) .* model\.max_length=128"):
        hub(str(folder), max_length=129).prepare(tmp_path)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_is_refused(missing, tmp_path):
    for name in {"config.json", "model.safetensors", "tokenizer.json"} - {missing}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=missing.split(".")[-1]):
        checked(tmp_path, max_length=1)


def test_a_failed_build_leaves_nothing_and_the_next_one_succeeds(tmp_path):
    target = tmp_path / "model"

    def broken(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(target, broken)
    assert not target.exists()
    build_once(target, lambda folder: (folder / "whole").touch())
    assert [path.name for path in target.iterdir()] == ["whole"]


def slow_build(folder: Path) -> None:
    with (folder.parent / "builds").open("a") as log:
        log.write(f"{os.getpid()}\n")
    time.sleep(0.5)
    (folder / "done").touch()


def test_two_processes_preparing_together_build_once(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    both = [spawn.Process(target=build_once, args=(tmp_path / "model", slow_build)) for _ in "ab"]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert len((tmp_path / "builds").read_text().split()) == 1
    assert not sibling(tmp_path / "model", "unfinished").exists()


def test_the_key_ignores_order_and_sees_every_value():
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert key_of({"a": 1, "b": 2}) != key_of({"a": 1, "b": 3})
