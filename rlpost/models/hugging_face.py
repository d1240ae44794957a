"""A model that exists: a local folder, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt

from rlpost.errors import ModelError
from rlpost.models.base import Dtype
from rlpost.models.folder import checked

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


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
            folder = self._snapshot(folder.absolute())
        return checked(folder.absolute(), max_length=self.config.max_length)

    def _snapshot(self, looked_at: Path) -> Path:
        name = self.config.path
        if looks_local(name):
            raise ModelError(f"model.path ({name}): there is no folder {looked_at}")
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HFValidationError

        try:
            path = snapshot_download(name, revision=self.config.revision, allow_patterns=FILES)
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
