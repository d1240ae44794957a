"""Small changes of a configuration, tried when it does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from rlpost.config import RunConfig, Section

Variant = tuple[str, RunConfig]  # as written on the command line, and what it makes
FACTORS = range(2, 9)
CUTS = (
    ("trainer", "data_parallel_size"),
    ("trainer", "tensor_model_parallel_size"),
    ("engine", "tensor_parallel_size"),
)


def fewer_workers(config: RunConfig) -> Iterator[Variant]:
    """Fewer copies of the trainer or of the engine, from many to few."""
    for size in range(getattr(config.trainer.config, "data_parallel_size", 1) - 1, 0, -1):
        yield from changed(config, "trainer", "data_parallel_size", size)
    if config.engine is not None:
        for count in range(config.engine.config.num_engines - 1, 0, -1):
            yield from changed(config, "engine", "num_engines", count)


def cut_over_more(config: RunConfig) -> Iterator[Variant]:
    """Models, or the optimizer's state alone, cut over more ranks."""
    for factor in FACTORS:
        for group, key in CUTS:
            section = getattr(config, group)
            if section is not None and hasattr(section.config, key):
                yield from changed(config, group, key, getattr(section.config, key) * factor)


def halves(config: RunConfig) -> Iterator[Variant]:
    """Weights in half the bytes."""
    if config.model.config.dtype == "float32":
        yield from changed(config, "model", "dtype", "bfloat16")


def smaller_kv_cache(config: RunConfig, num_bytes: int) -> Iterator[Variant]:
    """`num_bytes` less on each engine."""
    options = {} if config.engine is None else config.engine.config.vllm
    given = options.get("kv_cache_memory_bytes")
    if given is not None and given > num_bytes:
        left = int(given) - num_bytes
        text = f"engine.vllm.kv_cache_memory_bytes={left}"
        for _, made in changed(
            config, "engine", "vllm", {**options, "kv_cache_memory_bytes": left}
        ):
            yield text, made


def changed(config: RunConfig, group: str, key: str, value: Any) -> Iterator[Variant]:
    """Nothing where the section, or the batch, refuses the value."""
    section: Section = getattr(config, group)
    per_step = config.train_batch_size // config.algorithm.config.num_minibatches
    if key == "data_parallel_size" and per_step % value:
        return
    try:
        made: Any = replace(section, config=replace(section.config, **{key: value}))
    except ValueError:
        return
    yield f"{group}.{key}={value}", replace(config, **{group: made})


def first_of_each_key(texts: Iterable[str]) -> list[str]:
    """["a=4", "a=2", "b=1"] -> ["a=4", "b=1"]."""
    found: dict[str, str] = {}
    for text in texts:
        found.setdefault(text.partition("=")[0], text)
    return list(found.values())


def either(ways: Iterable[str]) -> str:
    """The first ways of each kind, joined; "" without any."""
    return " or ".join(dict.fromkeys(ways))
