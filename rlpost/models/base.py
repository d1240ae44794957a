"""The contract of a model: a Hugging Face folder, however it comes about."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

Dtype = Literal["float32", "bfloat16"]


class ModelConfig(Protocol):
    """What every model's Config has, beside its own keys.

    `dtype` is what trainer and engine compute in; `max_length` bounds prompt plus response, tokens.
    """

    @property
    def dtype(self) -> Dtype: ...

    @property
    def max_length(self) -> int: ...


class Model(Protocol):
    """Built from its Config; cheap to construct, since the work is done by `prepare`."""

    config: Any  # a ModelConfig

    def prepare(self, cache_dir: Path) -> Path:
        """A local folder with config.json, safetensors and a tokenizer; may build or download it.

        Same settings, same folder: a second call returns at once. Safe when several processes call
        it together. Raises ModelError.
        """

    def settings(self) -> Mapping[str, Any] | None:
        """What config.json of that folder says of the model's sizes, or will say once it is built.

        Builds and downloads nothing; None: not known before `prepare`. Raises ConfigError.
        """
