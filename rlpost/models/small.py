"""A small random model of a model's kind: the same architecture and tokenizer, a few weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.errors import ModelError
from rlpost.lazy import LazyModule
from rlpost.models.base import Model
from rlpost.models.cache import build_once, key_of
from rlpost.models.folder import read_settings, save_quietly

if TYPE_CHECKING:
    import torch
    import transformers
else:
    torch = LazyModule("torch")
    transformers = LazyModule("transformers")

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
# Say something of each layer of the large model, or how it is stored.
DROPPED = ("layer_types", "quantization_config", "_name_or_path")
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".gguf")


def prepare_small(model: Model, cache_dir: Path) -> Path:
    """A folder as `model.prepare` gives, with random weights; trains nothing. Raises ModelError.

    A model that knows a quicker way than a small copy of itself has `prepare_small(cache_dir)`.
    """
    own = getattr(model, "prepare_small", None)
    folder: Path = own(cache_dir) if own else small_copy(model.prepare(cache_dir), cache_dir)
    return folder


def settings_when_small(model: Any) -> Mapping[str, Any] | None:
    """What `model.settings` will say of that folder; None where nothing is known before.

    A model with a `prepare_small` of its own that keeps other sizes has `small_model_settings()`.
    """
    own = getattr(model, "small_model_settings", None)
    if own is not None:
        found: Mapping[str, Any] | None = own()
        return found
    settings = getattr(model, "settings", lambda: None)()
    return None if settings is None else small_settings(settings)


def small_copy(folder: Path, cache_dir: Path) -> Path:
    """`folder` needs a config.json and a tokenizer, no weights."""
    settings = small_settings(read_settings(folder / "config.json"))
    key = key_of({"settings": settings, "tokenizer": str(folder.resolve())})
    return build_once(cache_dir / f"small-{key}", lambda empty: write(folder, settings, empty))


def small_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in settings.items() if name not in DROPPED}
    return {**kept, **SIZES, "dtype": "float32", "torch_dtype": "float32"}


def small_classifier(folder: Path, cache_dir: Path) -> Path:
    """A small causal model of this project as a classifier of tokens with two labels."""
    settings = read_settings(folder / "config.json")
    (causal,) = settings["architectures"]
    labels = {
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    }
    kind = causal.replace("ForCausalLM", "ForTokenClassification")
    settings = {**settings, **labels, "architectures": [kind]}
    key = key_of({"settings": settings, "tokenizer": str(folder.resolve())})
    return build_once(cache_dir / f"small-{key}", lambda empty: write(folder, settings, empty))


def write(source: Path, settings: Mapping[str, Any], folder: Path) -> None:
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS):
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    save_quietly(random_model(folder), folder)


def random_model(folder: Path) -> Any:
    """From its config.json; the caller's RNG is left as it was."""
    config = transformers.AutoConfig.from_pretrained(folder)
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise ModelError(f"{folder}/config.json: architectures {names} names no known class")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return kind(config).to(torch.float32)
