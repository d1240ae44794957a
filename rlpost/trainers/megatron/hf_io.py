"""Hugging Face model folders on disk: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlpost.errors import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "spiece.model",
)


def read_config(folder: str | Path) -> Any:
    """The transformers configuration of a local folder. Raises ModelError."""
    from transformers import AutoConfig

    if not (Path(folder) / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json; the model path must be a local Hugging Face folder"
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except ValueError as error:
        raise ModelError(f"{folder}/config.json can't be read: {error}") from error


class HfReader:
    """Reads tensors by name from a single or a sharded safetensors folder; files open on demand."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._handles: dict[Path, Any] = {}
        self._file_of = self._locate()

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Raises ModelError naming folder and tensor when it is missing."""
        if name not in self._file_of:
            raise ModelError(f"{self._folder} has no tensor {name!r}; config.json asks for it")
        tensor: torch.Tensor = self._open(self._file_of[name]).get_tensor(name)
        return tensor

    def _locate(self) -> dict[str, Path]:
        index = self._folder / _INDEX
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError) as error:
                raise ModelError(f"{index} is damaged: {error!r}") from error
            return {name: self._folder / file for name, file in weight_map.items()}
        single = self._folder / _SINGLE
        return dict.fromkeys(self._open(single).keys(), single)

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            if not path.is_file():
                raise ModelError(f"{path} is missing; a model folder needs {_SINGLE} or {_INDEX}")
            try:
                self._handles[path] = safe_open(path, "pt")
            except SafetensorError as error:
                raise ModelError(f"{path} is damaged: {error}") from error
        return self._handles[path]


def with_fresh_head(
    reader: HfReader, prefix: str, num_outputs: int, hidden_size: int
) -> Callable[[str], torch.Tensor]:
    """Tensors of a folder by name; a linear head that it does not have starts at zero."""
    fresh = {
        f"{prefix}weight": torch.zeros(num_outputs, hidden_size),
        f"{prefix}bias": torch.zeros(num_outputs),
    }
    missing = set(fresh) - set(reader.names())
    return lambda name: fresh[name] if name in missing else reader.get_tensor(name)


def write_folder(
    target: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    hf_config: Any,
    dtype: torch.dtype,
    source: str | Path,
) -> None:
    """Writes a complete folder; it appears under its final name only when whole.

    Tokenizer files are copied from `source`. Raises ModelError when `target` exists.
    """
    final = Path(target)
    if final.exists():
        raise ModelError(f"{final} exists already; choose another folder or remove it")
    final.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        _write_parts(part, dict(tensors), hf_config, dtype)
        _copy_tokenizer(Path(source), part)
        part.chmod(0o755)
        part.rename(final)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_parts(
    folder: Path, tensors: dict[str, torch.Tensor], hf_config: Any, dtype: torch.dtype
) -> None:
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / _SINGLE, metadata={"format": "pt"})
    config = copy.deepcopy(hf_config)
    config.dtype = dtype
    config.save_pretrained(folder)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy2(file, folder / file.name)
