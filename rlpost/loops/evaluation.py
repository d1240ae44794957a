"""Held-out accuracy under one policy version."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from rlpost.errors import ConfigError
from rlpost.types import GroupHandle, Sampling
from rlpost.validation import Section

if TYPE_CHECKING:
    from rlpost.data.base import PromptSource
    from rlpost.loops.rollouts import Rollouts


@dataclass(frozen=True)
class EvaluatorConfig:
    """`data` is a prompt source section; `interval` counts steps."""

    data: Section
    num_prompts: PositiveInt | None
    num_samples: PositiveInt
    interval: NonNegativeInt
    before_training: bool
    temperature: NonNegativeFloat
    top_p: Annotated[float, Field(gt=0, le=1)]

    def __post_init__(self) -> None:
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"num_samples ({self.num_samples}) answers are all the same at temperature 0, "
                "which is greedy; raise temperature, or set num_samples: 1"
            )

    def check_size(self, num_prompts: int) -> None:
        """Raises ConfigError when the data set has fewer prompts than are to be asked."""
        if self.num_prompts is not None and self.num_prompts > num_prompts:
            raise ConfigError(
                [
                    f"eval.num_prompts ({self.num_prompts}) is more than the {num_prompts} prompts "
                    "of eval.data; lower it, or set null to ask them all"
                ]
            )


def held_out(config: EvaluatorConfig) -> PromptSource:
    """The data set, in an order that no run's seed changes: runs that differ by their seed are
    asked the same prompts. Raises DataError."""
    source: PromptSource = config.data.target(config.data.config, seed=0)
    return source


class Evaluator:
    """Asks the first `num_prompts` prompts of its source and reports mean accuracy."""

    Config = EvaluatorConfig

    def __init__(
        self, config: EvaluatorConfig, *, source: PromptSource, max_response_tokens: int
    ) -> None:
        """Raises ConfigError when `source` has fewer prompts than are to be asked."""
        config.check_size(len(source))
        self.config = config
        self.source = source
        self._sampling = Sampling(
            temperature=config.temperature, top_p=config.top_p, max_tokens=max_response_tokens
        )

    def due(self, step: int, *, epoch_end: bool, last: bool) -> bool:
        """Whether an eval follows after `step` finished steps (0 = before training)."""
        if step == 0:
            return self.config.before_training
        interval = self.config.interval
        return last or epoch_end or (interval > 0 and step % interval == 0)

    async def run(self, rollouts: Rollouts, policy_version: int) -> dict[str, float]:
        """Metrics `eval/<data set>/...`; answers that could not be judged count in `missing`."""
        count = self.config.num_prompts or len(self.source)
        prompts = [self.source.get(0, index) for index in range(count)]
        groups = await rollouts.generate(
            prompts,
            group_size=self.config.num_samples,
            sampling=self._sampling,
            record="eval",
            policy_version=policy_version,
        )
        return eval_metrics(self.source.name, groups)


def eval_metrics(name: str, groups: list[GroupHandle]) -> dict[str, float]:
    """Accuracy is over judged answers; a failed or unjudged one is counted, not scored 0."""
    values = [value for group in groups for value in group.accuracies]
    known = [value for value in values if not math.isnan(value)]
    lengths = [tokens for group in groups for tokens in group.loss_tokens]
    cut = [reason == "length" for group in groups for reason in group.finish_reasons]
    return {
        f"eval/{name}/accuracy": sum(known) / len(known) if known else math.nan,
        f"eval/{name}/num_answers": float(len(known)),
        f"eval/{name}/missing": float(
            len(values) - len(known) + sum(bool(g.failure) for g in groups)
        ),
        f"eval/{name}/length/mean": sum(lengths) / len(lengths) if lengths else math.nan,
        f"eval/{name}/truncated/ratio": sum(cut) / len(cut) if cut else math.nan,
    }
