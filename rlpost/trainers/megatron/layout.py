"""Which part of the parallel layout this rank is. Read once Megatron's groups exist."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state


@dataclass(frozen=True)
class Layout:
    tensor_rank: int
    data_rank: int
    data_size: int
    stage: int
    num_stages: int

    @classmethod
    def read(cls) -> Layout:
        return cls(
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            data_rank=parallel_state.get_data_parallel_rank(),
            data_size=parallel_state.get_data_parallel_world_size(),
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            num_stages=parallel_state.get_pipeline_model_parallel_world_size(),
        )

    @property
    def owns_results(self) -> bool:
        """One rank of each data-parallel share reports what was computed there."""
        return self.tensor_rank == 0 and self.stage == self.num_stages - 1

    @property
    def reports_run(self) -> bool:
        """One rank of the role reports what is equal on all (gradient norm, learning rate)."""
        return self.owns_results and self.data_rank == 0

    @property
    def exports(self) -> bool:
        """One rank of each pipeline stage holds the stage's full weights at an export."""
        return self.tensor_rank == 0 and self.data_rank == 0

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the data-parallel ranks; all of them call it."""
        if self.data_size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total
