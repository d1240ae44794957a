"""A small random decoder with a vocabulary of characters: for demos, tests and timing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from rlpost.lazy import LazyModule
from rlpost.models.base import Dtype
from rlpost.models.cache import build_once, key_of
from rlpost.models.characters import (
    EOS,
    PAD,
    SPECIALS,
    character_tokenizer,
    padded_size,
    vocabulary,
)
from rlpost.models.folder import save_quietly
from rlpost.validation import Seed

if TYPE_CHECKING:
    import torch
    import transformers
else:
    torch = LazyModule("torch")
    transformers = LazyModule("transformers")


@dataclass(frozen=True)
class TinyModelConfig:
    num_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    num_key_value_heads: PositiveInt
    initializer_range: PositiveFloat
    characters: Annotated[str, Field(min_length=1)]
    vocab_multiple: PositiveInt
    model_seed: Seed
    dtype: Dtype
    max_length: PositiveInt

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_heads "
                f"({self.num_heads}); try {-(-self.hidden_size // self.num_heads) * self.num_heads}"
            )
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        twice = sorted({c for c in self.characters if self.characters.count(c) > 1})
        if twice:
            raise ValueError(f"characters holds {twice} more than once; name each only once")


class TinyModel:
    """Random weights: the same settings give the same bytes."""

    Config = TinyModelConfig

    def __init__(self, config: TinyModelConfig) -> None:
        self.config = config

    def prepare(self, cache_dir: Path) -> Path:
        return build_once(cache_dir / f"tiny-{key_of(asdict(self.config))}", self._write)

    def prepare_small(self, cache_dir: Path) -> Path:
        """It is small already, and its sizes are the user's own."""
        return self.prepare(cache_dir)

    def small_model_settings(self) -> dict[str, Any]:
        return self.settings()

    def settings(self) -> dict[str, Any]:
        """Qwen3 and not Qwen2: for Qwen2, AutoTokenizer replaces any tokenizer by Qwen's own."""
        config = self.config
        return {
            "model_type": "qwen3",
            "vocab_size": padded_size(config.characters, config.vocab_multiple),
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.hidden_size // config.num_heads,
            "max_position_embeddings": config.max_length,
            "tie_word_embeddings": False,
        }

    def _write(self, folder: Path) -> None:
        config, settings = self.config, self.settings()
        tokens = vocabulary(config.characters, settings["vocab_size"])
        character_tokenizer(tokens, max_length=config.max_length).save_pretrained(folder)
        save_quietly(random_decoder(config, settings), folder)


def random_decoder(config: TinyModelConfig, sizes: Mapping[str, Any]) -> Any:
    """Initialised from `model_seed`; the caller's RNG is left as it was."""
    kept = {name: value for name, value in sizes.items() if name != "model_type"}
    settings = transformers.Qwen3Config(
        **kept,
        initializer_range=config.initializer_range,
        pad_token_id=SPECIALS.index(PAD),
        eos_token_id=SPECIALS.index(EOS),
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.model_seed)
        model = transformers.Qwen3ForCausalLM(settings)
    return model.to(getattr(torch, config.dtype))
