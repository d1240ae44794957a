"""Reading and writing Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from rlpost.errors import ModelError
from rlpost.trainers.megatron.hf_io import HfReader, read_config, write_folder

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}


def write(target: Path, source: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    write_folder(target, tensors, hf_config=LlamaConfig(), dtype=torch.float32, source=source)


def test_written_folder_reads_back(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    write(tmp_path / "out", source, iter(TENSORS.items()))
    reader = HfReader(tmp_path / "out")
    assert reader.names() == ["a", "b"]
    assert all(torch.equal(reader.get_tensor(name), TENSORS[name]) for name in TENSORS)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert read_config(tmp_path / "out").dtype == torch.float32


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", TENSORS["a"]
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        write(tmp_path / "out", tmp_path, broken())
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        write(tmp_path / "out", tmp_path, iter(TENSORS.items()))


def test_sharded_folder_is_read_through_its_index(tmp_path: Path) -> None:
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    weight_map = {name: f"{name}.safetensors" for name in TENSORS}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    reader = HfReader(tmp_path)
    assert all(torch.equal(reader.get_tensor(name), TENSORS[name]) for name in TENSORS)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor 'lm_head.weight'"):
        HfReader(tmp_path).get_tensor("lm_head.weight")


def test_missing_weights_and_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model.safetensors is missing"):
        HfReader(tmp_path)
    with pytest.raises(ModelError, match=r"no config.json"):
        read_config(tmp_path / "nowhere")


def test_truncated_weights_are_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(ModelError, match="damaged"):
        HfReader(tmp_path)
