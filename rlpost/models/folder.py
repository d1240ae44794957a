"""What makes a folder a usable Hugging Face model, and writing one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.errors import ModelError
from rlpost.lazy import LazyModule

if TYPE_CHECKING:
    from transformers.utils import logging as transformers_logging
else:
    transformers_logging = LazyModule("transformers.utils.logging")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def checked(folder: Path, *, max_length: int) -> Path:
    """Returns `folder`. Raises ModelError that names what is missing, or a max_length too long."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is no Hugging Face model: config.json is missing")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder} holds no *.safetensors; save the model again with "
            "save_pretrained(..., safe_serialization=True)"
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    check_length(folder, max_length)
    return folder


def read_settings(file: Path) -> dict[str, Any]:
    """The content of a config.json. Raises ModelError."""
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} can't be read: {error}") from error
    return settings


def check_length(folder: Path, max_length: int) -> None:
    """Raises ModelError for more tokens than the model has positions."""
    config = read_settings(folder / "config.json")
    limit = config.get("max_position_embeddings", max_length)
    if max_length > limit:
        raise ModelError(
            f"model.max_length ({max_length}) is more than the {limit} positions of the model in "
            f"{folder}; try model.max_length={limit}"
        )


def save_quietly(model: Any, folder: Path) -> None:
    """`save_pretrained` without its progress bar, which would stand between a run's own lines."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
