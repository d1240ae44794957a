"""One rank of the critic on Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost.algorithms.base import ValueAlgorithm
from rlpost.trainers.megatron.role import MegatronRole, MegatronRoleConfig
from rlpost.types import BatchView, PassResult

if TYPE_CHECKING:
    from rlpost.trainers.megatron.critic import Critic


@dataclass(frozen=True)
class MegatronCriticRankConfig(MegatronRoleConfig):
    """As any role's: its own layout, optimizer and limits."""


class MegatronCriticRank(MegatronRole["Critic"]):
    """CriticRank. `model_path` may be a causal model (the value head starts at zero) or a critic's
    own export."""

    Config = MegatronCriticRankConfig
    head = "value"
    algorithm: ValueAlgorithm

    def _builder(self) -> Callable[[], Critic]:
        from rlpost.trainers.megatron.critic import Critic

        return lambda: Critic(
            self.config, model_path=self.model_path, dtype=self.dtype, algorithm=self.algorithm
        )

    def compute_values(self, view: BatchView, column: str) -> PassResult:
        return self._network.compute_values(view, column)
