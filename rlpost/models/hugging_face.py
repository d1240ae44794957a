"""A model that exists: a local folder, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from rlpost.errors import ModelError
from rlpost.models.base import Dtype
from rlpost.models.folder import checked, read_settings
from rlpost.models.small import small_copy

WEIGHTS = "*.safetensors"
FILES = ["*.json", WEIGHTS, "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class HuggingFaceModelConfig:
    path: Annotated[str, Field(min_length=1)]
    revision: str
    dtype: Dtype
    max_length: PositiveInt


class HuggingFaceModel:
    """`path` is a folder if one exists there, else a Hub id such as Qwen/Qwen3-0.6B."""

    Config = HuggingFaceModelConfig

    def __init__(self, config: HuggingFaceModelConfig) -> None:
        self.config = config

    def prepare(self, cache_dir: Path) -> Path:
        """The folder itself, or the Hub's snapshot in its own cache (HF_HOME), not `cache_dir`."""
        folder = Path(self.config.path).expanduser()
        if not folder.is_dir():
            folder = self._snapshot(folder.absolute(), FILES)
        return checked(folder.absolute(), max_length=self.config.max_length)

    def prepare_small(self, cache_dir: Path) -> Path:
        """Of the Hub's files the weights are left out."""
        folder = Path(self.config.path).expanduser()
        if not folder.is_dir():
            folder = self._snapshot(folder.absolute(), [name for name in FILES if name != WEIGHTS])
        return small_copy(folder.absolute(), cache_dir)

    def settings(self) -> Mapping[str, Any] | None:
        """Of the folder, or of what the Hub's cache holds."""
        folder = Path(self.config.path).expanduser()
        file = folder / "config.json" if folder.is_dir() else self._cached("config.json")
        return None if file is None or not file.is_file() else read_settings(file)

    def _cached(self, name: str) -> Path | None:
        """Where the Hub's cache holds a file of the repository; None where it does not."""
        if looks_local(self.config.path):
            return None
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.config.path, name, revision=self.config.revision)
        return Path(found) if isinstance(found, str) else None

    def _snapshot(self, looked_at: Path, files: list[str]) -> Path:
        name = self.config.path
        if looks_local(name):
            raise ModelError(f"model.path ({name}): there is no folder {looked_at}")
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HFValidationError

        try:
            path = snapshot_download(name, revision=self.config.revision, allow_patterns=files)
        except (HFValidationError, OSError) as error:
            raise ModelError(
                f"model.path ({name}, revision {self.config.revision}) was found neither as folder "
                f"{looked_at}, nor in the cache {constants.HF_HUB_CACHE}, nor on the Hugging Face "
                f"Hub: {first_line(error)}. {way_out()}"
            ) from error
        return Path(path)


def looks_local(path: str) -> bool:
    """Hub ids are `name` or `owner/name`: anything else can only be a folder."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def way_out() -> str:
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE is set: unset it to download, or give model.path a local folder"
    return (
        "Check the name and the network (a gated model needs HF_TOKEN), or download it elsewhere "
        "and give model.path the local folder"
    )
