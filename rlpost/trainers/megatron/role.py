"""What ranks of all roles on Megatron-Core share. Torch and Megatron are imported in setup()."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlpost.errors import TrainerError
from rlpost.memory import WorkerMemory
from rlpost.models.base import Dtype
from rlpost.models.shape import Head, ModelShape
from rlpost.trainers.base import RankSpec, RankTask, TrainResult
from rlpost.trainers.megatron.memory import checkpoint_bytes, rank_memory
from rlpost.trainers.megatron.options import LrScheduleConfig, OptimizerConfig
from rlpost.types import BatchView

if TYPE_CHECKING:
    from rlpost.trainers.megatron.network import Network

N = TypeVar("N", bound="Network")


@dataclass(frozen=True)
class MegatronRoleConfig:
    """Layout, memory, optimizer and limits of a role's ranks."""

    tensor_model_parallel_size: PositiveInt
    pipeline_model_parallel_size: PositiveInt
    data_parallel_size: PositiveInt
    make_vocab_size_divisible_by: PositiveInt
    micro_batch_tokens: PositiveInt
    megatron: dict[str, Any]
    optimizer: OptimizerConfig
    lr_schedule: LrScheduleConfig
    max_skipped_steps: NonNegativeInt
    num_cpus_per_rank: NonNegativeFloat
    num_gpus_per_rank: NonNegativeFloat
    threads_per_rank: PositiveInt
    setup_deadline_s: PositiveFloat
    step_deadline_s: PositiveFloat

    def __post_init__(self) -> None:
        if self.lr_schedule.min_lr > self.optimizer.lr:
            raise ValueError(
                f"lr_schedule.min_lr ({self.lr_schedule.min_lr:g}) is above optimizer.lr "
                f"({self.optimizer.lr:g}); the rate decays from lr to min_lr"
            )
        if self.num_gpus_per_rank > 1:
            raise ValueError(
                f"num_gpus_per_rank ({self.num_gpus_per_rank:g}): one rank computes on one GPU; "
                "set 1, a share such as 0.5 (with loop.colocate), or 0 for the CPU"
            )

    @property
    def world_size(self) -> int:
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.data_parallel_size
        )

    @property
    def env(self) -> dict[str, str]:
        """Set in a worker before it imports anything."""
        return {
            "OMP_NUM_THREADS": str(self.threads_per_rank),
            # Megatron orders communication and computation of tensor parallelism by it.
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }

    def memory(self, task: RankTask, head: Head) -> WorkerMemory:
        """What one rank will take."""
        return rank_memory(self, task, head)

    def checkpoint_bytes(self, shape: ModelShape, dtype: Dtype, head: Head) -> int:
        """Of the role in one checkpoint, on disk."""
        return checkpoint_bytes(shape, dtype, head)


class MegatronRole(ABC, Generic[N]):
    """One rank of a role. All ranks of a role are called together (see trainers/base.py)."""

    head: ClassVar[Head] = "logits"

    def __init__(
        self,
        config: MegatronRoleConfig,
        *,
        spec: RankSpec,
        model_path: str,
        dtype: str,
        algorithm: Any,
        seed: int,
    ) -> None:
        self.config = config
        self.spec = spec
        self.model_path = model_path
        self.dtype = dtype
        self.algorithm = algorithm
        self.seed = seed
        self._built: N | None = None

    @abstractmethod
    def _builder(self) -> Callable[[], N]:
        """Imports what the role needs; the result builds the model once all ranks have joined."""

    def setup(self) -> dict[str, float]:
        """Joins the process group, builds and loads the model: {"import", "join", "build"}, s.

        Raises ModelError, ConfigError or TrainerError.
        """
        self._check_spec()
        seconds: dict[str, float] = {}
        with _timed(seconds, "import"):
            from rlpost.trainers.megatron import device, model

            build = self._builder()
        self._check_device(has_cuda=device.has_cuda())
        with _timed(seconds, "join"):
            device.set_num_threads(self.config.threads_per_rank)
            device.set_device(self.spec.rank)
            device.prepare()
            self._join(device.dist_backend())
            model.init_parallel(
                tp=self.config.tensor_model_parallel_size,
                pp=self.config.pipeline_model_parallel_size,
                seed=self.seed,
            )
        with _timed(seconds, "build"):
            self._built = build()
        return seconds

    def _check_spec(self) -> None:
        if self.spec.world_size != self.config.world_size:
            raise TrainerError(
                f"{self.spec.role} was started with {self.spec.world_size} ranks, but tensor x "
                f"pipeline x data parallel size is {self.config.world_size}"
            )

    def _check_device(self, *, has_cuda: bool) -> None:
        """A rank that was promised a GPU must not go on quietly on the CPU."""
        if self.config.num_gpus_per_rank > 0 and not has_cuda:
            raise TrainerError(
                f"{self.spec.role}[{self.spec.rank}] asked for num_gpus_per_rank "
                f"({self.config.num_gpus_per_rank:g}), but torch sees no GPU: check nvidia-smi, "
                "cluster.num_gpus and that torch is a CUDA build, or set 0"
            )

    def _join(self, backend: str) -> None:
        import torch.distributed as dist

        spec, meeting = self.spec, self.spec.rendezvous
        timeout = timedelta(seconds=max(self.config.setup_deadline_s, self.config.step_deadline_s))
        store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but in no __all__
            meeting.address,
            meeting.port,
            spec.world_size,
            is_master=spec.rank == 0,
            timeout=timeout,
            master_listen_fd=meeting.listen_fd if spec.rank == 0 else None,
        )
        dist.init_process_group(
            backend, store=store, rank=spec.rank, world_size=spec.world_size, timeout=timeout
        )

    @property
    def _network(self) -> N:
        if self._built is None:
            raise TrainerError(f"{self.spec.role}[{self.spec.rank}] was used before setup()")
        return self._built

    def train(self, view: BatchView) -> TrainResult:
        return self._network.train(view)

    def save_hf(self, path: str) -> None:
        self._network.save_hf(path)

    def save(self, path: str) -> None:
        self._network.save(path)

    def load(self, path: str) -> None:
        self._network.load(path)

    def offload(self) -> None:
        """On a CPU there is no device memory to free: nothing happens."""
        self._network.offload()

    def onload(self) -> None:
        self._network.onload()

    def parameters_hash(self) -> str:
        return self._network.parameters_hash()

    def memory(self) -> dict[str, float]:
        from rlpost.trainers.megatron import device

        held = {f"{part}_bytes": value for part, value in self._network.held_bytes().items()}
        return device.memory() | held


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started
