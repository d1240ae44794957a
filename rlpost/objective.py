"""The one number that a sweep compares its runs by, out of the metrics that a run reported."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rlpost.errors import ConfigError
from rlpost.wording import nearest

Direction = Literal["maximize", "minimize"]


@dataclass(frozen=True)
class ObjectiveConfig:
    """`*` in `metric` stands for any text: `eval/*/accuracy` fits `eval/chain_sum/accuracy`."""

    metric: Annotated[str, Field(min_length=1, pattern=r"^\S+$")]
    direction: Direction
    reduce: Literal["last", "best"]

    def fits(self, name: str) -> bool:
        pattern = ".*".join(re.escape(part) for part in self.metric.split("*"))
        return re.fullmatch(pattern, name) is not None


def objective_of(config: ObjectiveConfig, history: Mapping[str, Sequence[float]]) -> float:
    """Value of the run whose metrics took the values of `history`, step after step.

    NaN when the metric has no value (no answer could be judged). Raises ConfigError when the run
    reported no such metric, or more than one that fits.
    """
    values = history[the_metric(config, history)]
    if config.reduce == "last":
        return values[-1]
    known = [value for value in values if not math.isnan(value)]
    best = max if config.direction == "maximize" else min
    return best(known, default=math.nan)


def the_metric(config: ObjectiveConfig, names: Mapping[str, object]) -> str:
    """The one name that fits."""
    fitting = [name for name in names if config.fits(name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        problem = f"fits {len(fitting)} metrics of the run; write one of them: {', '.join(fitting)}"
    else:
        hint = nearest(config.metric, names)
        problem = f"the run reported no such metric{hint}; {near(config, names)}"
    raise ConfigError([f"objective.metric ({config.metric}): {problem}"])


def near(config: ObjectiveConfig, names: Mapping[str, object]) -> str:
    """What the run reported in the same area, or the areas that there are."""
    area = config.metric.split("/")[0]
    same = sorted(name for name in names if name.split("/")[0] == area)
    if same:
        return f"under {area}/ it reported {', '.join(same)}"
    areas = sorted({name.split("/")[0] for name in names})
    return f"it reported metrics under {', '.join(areas) or 'no name'}"
