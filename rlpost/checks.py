"""Rules that reach across sections. All are checked before anything starts.

What only a section can know it says itself, in an optional method of its Config:
`conflicts(run: RunConfig) -> Iterable[str]`, one line per problem. A rollout's Config names what it
cannot do without in `requires`, a tuple of groups such as ("engine", "reward").
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlpost.config import RunConfig
from rlpost.errors import ConfigError
from rlpost.models.hugging_face import looks_local


def check(config: RunConfig) -> None:
    """Raises ConfigError with every rule that is broken."""
    problems = [line for rule in RULES for line in rule(config)]
    if problems:
        raise ConfigError(problems)


def batch_holds_whole_groups(config: RunConfig) -> Iterator[str]:
    size, group = config.train_batch_size, config.group_size
    if size % group:
        yield (
            f"train_batch_size ({size}) must be a multiple of group_size ({group}); "
            f"try {multiples_around(size, group)}"
        )


def minibatches_hold_whole_groups(config: RunConfig) -> Iterator[str]:
    prompts, count = config.train_batch_size // config.group_size, num_minibatches(config)
    if prompts % count:
        fitting = [str(number) for number in range(1, prompts + 1) if prompts % number == 0]
        yield (
            f"algorithm.num_minibatches ({count}) must divide the {prompts} prompts of a batch "
            f"(train_batch_size / group_size); try {' or '.join(fitting)}"
        )


def ranks_share_evenly(config: RunConfig) -> Iterator[str]:
    ranks = config.trainer.config.data_parallel_size
    samples = config.train_batch_size // num_minibatches(config)
    if samples % ranks:
        yield (
            f"the {samples} samples of an optimizer step (train_batch_size / "
            f"algorithm.num_minibatches) must be a multiple of the trainer's {ranks} data-parallel "
            f"ranks; try {multiples_around(samples, ranks)} samples, or another number of ranks"
        )


def lengths_fit_the_model(config: RunConfig) -> Iterator[str]:
    rollout, limit = config.rollout.config, config.model.config.max_length
    prompt, response = rollout.max_prompt_tokens, rollout.max_response_tokens
    if prompt + response > limit:
        yield (
            f"rollout.max_prompt_tokens ({prompt}) + rollout.max_response_tokens ({response}) are "
            f"more than model.max_length ({limit}); lower one of them or raise model.max_length"
        )


def groups_that_are_needed_are_there(config: RunConfig) -> Iterator[str]:
    needed: set[str] = set(getattr(config.rollout.config, "requires", ()))
    for group in sorted(needed):
        if getattr(config, group) is None:
            yield f"{group}: null, but {config.rollout.target.__name__} needs it; choose an option"


def weights_reach_the_engines(config: RunConfig) -> Iterator[str]:
    if config.engine is not None and config.weight_sync is None:
        yield "weight_sync: null, but engines would keep their first weights; choose an option"
    if config.engine is None and config.weight_sync is not None:
        yield "weight_sync: has no effect without engines; set weight_sync=null"
    if config.engine is None and config.eval is not None:
        yield "eval: needs engines to answer its prompts; set eval=null, or choose an engine"


def folders_exist(config: RunConfig) -> Iterator[str]:
    path = getattr(config.model.config, "path", None)
    if path is not None and looks_local(path) and not Path(path).expanduser().is_dir():
        yield f"model.path: there is no folder {path!r} (looked in {Path.cwd()})"
    resume = config.resume_from
    if resume is not None and not Path(resume).is_dir():
        yield f"resume_from: there is no folder {resume!r} (looked in {Path.cwd()})"


def sections_agree(config: RunConfig) -> Iterator[str]:
    for section in config.sections().values():
        conflicts: Any = getattr(section.config, "conflicts", None)
        if conflicts is not None:
            yield from conflicts(config)


RULES = (
    batch_holds_whole_groups,
    minibatches_hold_whole_groups,
    ranks_share_evenly,
    lengths_fit_the_model,
    groups_that_are_needed_are_there,
    weights_reach_the_engines,
    folders_exist,
    sections_agree,
)


def num_minibatches(config: RunConfig) -> int:
    return int(config.algorithm.config.num_minibatches)


def multiples_around(value: int, factor: int) -> str:
    """The nearest positive multiples: (96, 10) -> `90 or 100`."""
    below, above = value // factor * factor, -(-value // factor) * factor
    return " or ".join(str(way) for way in (below, above) if way)
