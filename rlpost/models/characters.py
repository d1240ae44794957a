"""A tokenizer of single characters, in the normal Hugging Face form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SPECIALS = (PAD, EOS, UNKNOWN)


def vocabulary(characters: str, size: int) -> list[str]:
    """[size] tokens in order of id: specials, the characters, then unused reserved ones.

    The reserved ones make up `size`, so every id a model can emit has a token.
    """
    tokens = [*SPECIALS, *characters]
    return tokens + [f"<reserved_{index}>" for index in range(len(tokens), size)]


def padded_size(characters: str, multiple: int) -> int:
    """Vocabulary size: specials and characters, rounded up to `multiple`."""
    needed = len(SPECIALS) + len(characters)
    return -(-needed // multiple) * multiple


def character_tokenizer(tokens: Sequence[str], *, max_length: int) -> Any:
    """A transformers tokenizer over `tokens`, see `vocabulary`; other characters become <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    reserved = [token for token in tokens if token.startswith("<reserved_")]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=reserved,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
