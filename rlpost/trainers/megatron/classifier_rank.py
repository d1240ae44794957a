"""One rank of a token classifier on Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlpost.algorithms.step_classification import StepClassification
from rlpost.trainers.megatron.role import MegatronRole, MegatronRoleConfig

if TYPE_CHECKING:
    from rlpost.trainers.megatron.classifier import Classifier


@dataclass(frozen=True)
class MegatronClassifierRankConfig(MegatronRoleConfig):
    """As any role's: its own layout, optimizer and limits."""

    def conflicts(self, run: Any) -> Iterator[str]:
        """`run` is the whole RunConfig."""
        if getattr(run.algorithm.target, "trains_policy", True):
            yield (
                f"trainer: a classifier can't be trained by {run.algorithm.target.__name__}; "
                "choose algorithm=step_classification, or trainer=megatron"
            )


class MegatronClassifierRank(MegatronRole["Classifier"]):
    """`model_path` may be a causal model (the labels' head starts at zero) or a classifier's own
    export. save_hf writes a `...ForTokenClassification` folder."""

    Config = MegatronClassifierRankConfig
    classifies = True
    head = "labels"
    algorithm: StepClassification

    def _builder(self) -> Callable[[], Classifier]:
        from rlpost.trainers.megatron.classifier import Classifier

        return lambda: Classifier(
            self.config, model_path=self.model_path, dtype=self.dtype, algorithm=self.algorithm
        )
