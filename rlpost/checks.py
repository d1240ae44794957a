"""Rules that reach across sections. All are checked before anything starts.

What only a section can know it says itself, in an optional method of its Config:
`conflicts(run: RunConfig) -> Iterable[str]`, one line per problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlpost.config import RunConfig, build
from rlpost.errors import ConfigError
from rlpost.models.hugging_face import looks_local
from rlpost.roles import served_prm, trainer_roles


def check(config: RunConfig, *, compared: bool = False) -> None:
    """Raises ConfigError with every rule that is broken. `compared`: the run is a sweep's job."""
    rules = (*RULES, objective_is_reported) if compared else RULES
    problems = [line for rule in rules for line in rule(config)]
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
    count = num_minibatches(config)
    samples = config.train_batch_size // count
    trainers = {"trainer": config.trainer}
    if config.critic is not None:
        trainers["critic"] = config.critic.trainer
    for name, trainer in trainers.items():
        ranks = trainer.config.data_parallel_size
        if samples % ranks:
            fitting = count * math.lcm(config.group_size, ranks)
            yield (
                f"the {samples} samples of an optimizer step (train_batch_size / "
                f"algorithm.num_minibatches) must be a multiple of the {name}'s {ranks} "
                f"data-parallel ranks; try train_batch_size="
                f"{multiples_around(config.train_batch_size, fitting)}, or another number of ranks"
            )


def values_have_a_critic(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm.target.__name__
    needed = "values" in build(config.algorithm).passes
    if needed and config.critic is None:
        yield f"critic: null, but {algorithm} needs values; choose an option (critic=megatron)"
    if not needed and config.critic is not None:
        yield (
            f"critic: has no effect, as {algorithm} reads no values; switch it off (~critic) "
            "or choose algorithm=ppo"
        )
    classifies = getattr(config.trainer.target, "classifies", False)
    if not classifies and not hasattr(config.trainer.target, "compute_logprobs"):
        yield f"trainer: {config.trainer.target.__name__} computes no log-probs; choose megatron"
    if config.critic is not None and not hasattr(config.critic.trainer.target, "compute_values"):
        yield (
            f"critic.trainer: {config.critic.trainer.target.__name__} computes no values; choose "
            "trainer@critic.trainer=megatron_critic"
        )


def critic_only_steps_end_at_an_update(config: RunConfig) -> Iterator[str]:
    steps = getattr(config.algorithm.config, "num_critic_only_steps", 0)
    interval = getattr(config.loop.config, "update_weights_interval", 1)
    if steps % interval:
        yield (
            f"algorithm.num_critic_only_steps ({steps}) must be a multiple of "
            f"loop.update_weights_interval ({interval}); try {multiples_around(steps, interval)}"
        )


def lengths_fit_the_model(config: RunConfig) -> Iterator[str]:
    rollout, limit = config.rollout.config, config.model.config.max_length
    prompt, response = rollout.max_prompt_tokens, rollout.max_response_tokens
    if prompt + response > limit:
        yield (
            f"rollout.max_prompt_tokens ({prompt}) + rollout.max_response_tokens ({response}) are "
            f"more than model.max_length ({limit}); lower one of them or raise model.max_length"
        )


def rollouts_have_what_they_need(config: RunConfig) -> Iterator[str]:
    """The rollout strategy says whether it samples; sampling needs engines and a reward."""
    name = config.rollout.target.__name__
    try:
        samples = build(config.rollout).sampling(config.group_size) is not None
    except ConfigError as error:
        yield from error.problems
        return
    if samples and config.engine is None:
        yield f"engine: null, but {name} samples from engines; choose an option"
    if samples and config.reward is None:
        yield f"reward: null, but what {name} samples has to be scored; choose an option"
    if not samples and config.engine is not None:
        yield f"engine: has no effect, as {name} asks no engine; switch it off (~engine)"
    if not samples and "old_logprobs" in build(config.algorithm).passes:
        yield (
            f"algorithm: {config.algorithm.target.__name__} compares with the policy that sampled, "
            f"but {name} samples nothing; choose algorithm=sft or another rollout"
        )


def weights_reach_the_engines(config: RunConfig) -> Iterator[str]:
    trains_policy = getattr(config.algorithm.target, "trains_policy", True)
    if config.engine is not None and config.weight_sync is None and trains_policy:
        yield "weight_sync: null, but engines would keep their first weights; choose an option"
    if config.engine is None and config.weight_sync is not None:
        yield "weight_sync: has no effect without engines; switch it off (~weight_sync)"
    if config.engine is None and config.eval is not None:
        yield "eval: needs engines to answer its prompts; switch it off (~eval)"


def shared_gpus_are_taken_in_turns(config: RunConfig) -> Iterator[str]:
    """A share of a GPU is what two roles have of it that are never there at the same time."""
    shares = [
        (f"{trainer_section(role)}.num_gpus_per_rank", parts.trainer.config.num_gpus_per_rank)
        for role, parts in trainer_roles(config).items()
        if role != "reference"  # the actor's section
    ]
    if config.engine is not None:
        shares.append(("engine.num_gpus_per_engine", config.engine.config.num_gpus_per_engine))
    turns = getattr(config.loop.config, "colocate", False)
    for key, share in shares:
        if 0 < share < 1 and not turns:
            yield (
                f"{key} ({share:g}) is a share of a GPU, whose memory would be taken twice; take "
                "turns (loop=sync loop.colocate=true) or set whole GPUs"
            )
    if (served := served_prm(config)) and 0 < served.engine.config.num_gpus_per_engine < 1:
        yield (
            f"prm.engine.num_gpus_per_engine ({served.engine.config.num_gpus_per_engine:g}) is a "
            "share of a GPU, but it serves all the time; set 0 or 1"
        )


def trainer_section(role: str) -> str:
    """Where a role's ranks are configured."""
    if role == "actor":
        return "trainer"
    return f"teachers.{role.removeprefix('teacher.')}.trainer" if "." in role else f"{role}.trainer"


def folders_exist(config: RunConfig) -> Iterator[str]:
    models = {"model": config.model} | {
        f"teachers.{name}.model": role.model for name, role in config.teachers.items()
    }
    for key, model in models.items():
        path = getattr(model.config, "path", None)
        if path is not None and looks_local(path) and not Path(path).expanduser().is_dir():
            yield f"{key}.path: there is no folder {path!r} (looked in {Path.cwd()})"
    samples = config.debug.samples_from
    if samples is not None and not Path(samples).is_dir():
        yield f"debug.samples_from: there is no folder {samples!r} (looked in {Path.cwd()})"
    elif samples is not None and not (Path(samples) / "samples").is_dir():
        yield f"debug.samples_from: {samples!r} is no folder of a run: it holds no samples/"
    resume = config.resume_from
    if resume is not None and not Path(resume).is_dir():
        yield f"resume_from: there is no folder {resume!r} (looked in {Path.cwd()})"


def objective_is_reported(config: RunConfig) -> Iterator[str]:
    """What is known before the run; whether the metric is there shows at its end."""
    objective = config.objective
    if objective and objective.metric.startswith("eval/") and config.eval is None:
        yield (
            f"objective.metric ({objective.metric}): there is no eval; choose an eval option, or "
            "compare by another metric, such as objective.metric=train/loss "
            "objective.direction=minimize, or by none (objective=null)"
        )


def sections_agree(config: RunConfig) -> Iterator[str]:
    for section in config.sections().values():
        conflicts: Any = getattr(section.config, "conflicts", None)
        if conflicts is not None:
            yield from conflicts(config)


def teachers_teach(config: RunConfig) -> Iterator[str]:
    """Teachers need a distillation, and room for what they read."""
    if config.teachers and config.distillation is None:
        yield (
            f"teachers: {', '.join(config.teachers)} would have no effect without distillation; "
            "choose distillation=topk (or sampled, full), or take the teacher out (~teacher)"
        )
    rollout = config.rollout.config
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    for name, role in config.teachers.items():
        if longest > role.model.config.max_length:
            yield (
                f"rollout.max_prompt_tokens + rollout.max_response_tokens ({longest}) are more "
                f"than teachers.{name}.model.max_length ({role.model.config.max_length}); raise it"
            )


RULES = (
    batch_holds_whole_groups,
    minibatches_hold_whole_groups,
    ranks_share_evenly,
    values_have_a_critic,
    critic_only_steps_end_at_an_update,
    lengths_fit_the_model,
    rollouts_have_what_they_need,
    weights_reach_the_engines,
    shared_gpus_are_taken_in_turns,
    folders_exist,
    teachers_teach,
    sections_agree,
)


def num_minibatches(config: RunConfig) -> int:
    return int(config.algorithm.config.num_minibatches)


def multiples_around(value: int, factor: int) -> str:
    """The nearest positive multiples: (96, 10) -> `90 or 100`."""
    below, above = value // factor * factor, -(-value // factor) * factor
    return " or ".join(str(way) for way in (below, above) if way)
