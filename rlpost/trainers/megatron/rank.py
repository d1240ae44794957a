"""One rank of the policy, or of a frozen copy of it, on Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from rlpost.algorithms.base import Algorithm
from rlpost.distillation.base import Distillation
from rlpost.engines.base import Stage, WeightChunk
from rlpost.trainers.base import RankSpec
from rlpost.trainers.megatron.role import MegatronRole, MegatronRoleConfig
from rlpost.types import BatchView, PassResult

if TYPE_CHECKING:
    from rlpost.trainers.megatron.policy import Policy


@dataclass(frozen=True)
class MegatronRankConfig(MegatronRoleConfig):
    logprobs_chunk_tokens: PositiveInt


class MegatronRank(MegatronRole["Policy"]):
    """TrainerRank. `algorithm` None makes a forward-only role: no gradients, no optimizer.

    `distillation` is given to the actor and to teachers; `teacher_path` to an actor whose teacher
    lives in its ranks.
    """

    Config = MegatronRankConfig
    config: MegatronRankConfig
    algorithm: Algorithm | None

    def __init__(
        self,
        config: MegatronRankConfig,
        *,
        spec: RankSpec,
        model_path: str,
        dtype: str,
        algorithm: Algorithm | None,
        temperature: float,
        distillation: Distillation | None = None,
        teacher_path: str | None = None,
        seed: int,
    ) -> None:
        super().__init__(
            config,
            spec=spec,
            model_path=model_path,
            dtype=dtype,
            algorithm=algorithm,
            seed=seed,
        )
        self.temperature = temperature
        self.distillation = distillation
        self.teacher_path = teacher_path

    def _builder(self) -> Callable[[], Policy]:
        from rlpost.trainers.megatron.policy import Policy

        return lambda: Policy(
            self.config,
            model_path=self.model_path,
            dtype=self.dtype,
            algorithm=self.algorithm,
            temperature=self.temperature,
            distillation=self.distillation,
            teacher_path=self.teacher_path,
        )

    def compute_logprobs(self, view: BatchView, column: str) -> PassResult:
        return self._network.compute_logprobs(view, column)

    def compute_teacher(self, view: BatchView, column: str) -> PassResult:
        return self._network.compute_teacher(view, column)

    def export_weights(self, dtype: str, stage: Stage) -> list[WeightChunk]:
        return self._network.export_weights(dtype, stage)
