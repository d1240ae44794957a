"""What engines of every kind are started from: their settings, a model folder, vLLM's options."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from rlpost.engines.async_llm import OwnProcesses
from rlpost.engines.backend import Backend
from rlpost.engines.inprocess import InProcess
from rlpost.engines.memory import EngineTask, engine_memory
from rlpost.engines.options import (
    environment,
    fixed_options,
    refuse_no_numbers,
    refuse_reserved,
    refuse_unknown,
)
from rlpost.errors import EngineError
from rlpost.memory import WorkerMemory, family_memory


@dataclass(frozen=True)
class ServingConfig:
    """`vllm` holds options of vLLM's EngineArgs under vLLM's own names.

    An engine with `num_gpus_per_engine: 0` runs on the CPU. `process_layout: auto` steps vLLM
    inside the worker on a CPU with one rank, and uses vLLM's own processes otherwise.
    """

    num_engines: PositiveInt
    tensor_parallel_size: PositiveInt
    process_layout: Literal["auto", "in_process", "async_llm"]
    num_cpus_per_engine: NonNegativeFloat
    num_gpus_per_engine: NonNegativeFloat
    threads_per_engine: PositiveInt
    start_deadline_s: PositiveFloat
    vllm: dict[str, Any]

    def __post_init__(self) -> None:
        refuse_reserved(self.vllm)
        refuse_no_numbers(self.vllm)
        if self.process_layout == "in_process" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"engine.process_layout (in_process) allows one rank only, "
                f"tensor_parallel_size is {self.tensor_parallel_size}; use async_llm or auto"
            )
        share = self.tensor_parallel_size == 1 and self.num_gpus_per_engine < 1
        if not share and self.num_gpus_per_engine not in (0, self.tensor_parallel_size):
            raise ValueError(
                f"engine.num_gpus_per_engine ({self.num_gpus_per_engine:g}) must be 0 (CPU) or "
                f"tensor_parallel_size ({self.tensor_parallel_size}); with tensor_parallel_size 1 "
                "it may be a share of a GPU, such as 0.5"
            )

    @property
    def on_cpu(self) -> bool:
        return self.num_gpus_per_engine == 0

    @property
    def layout(self) -> Literal["in_process", "async_llm"]:
        if self.process_layout != "auto":
            return self.process_layout
        return "in_process" if self.on_cpu and self.tensor_parallel_size == 1 else "async_llm"

    @property
    def env(self) -> dict[str, str]:
        """Environment of the worker process, to be set before it imports anything."""
        return environment(
            on_cpu=self.on_cpu,
            in_process=self.layout == "in_process",
            threads=self.threads_per_engine,
            tensor_parallel_size=self.tensor_parallel_size,
        )

    def memory(self, task: EngineTask) -> WorkerMemory:
        """What one engine will take."""
        return engine_memory(self, task)


@dataclass(frozen=True)
class Served:
    """A model on one engine, of role `engine` (the policy's) or `prm`."""

    role: str
    rank: int
    model_path: str
    dtype: str
    max_model_len: int
    seed: int

    @property
    def name(self) -> str:
        """In messages."""
        return f"{self.role}[{self.rank}]"

    @property
    def section(self) -> str:
        """Where its engine is configured."""
        return "engine" if self.role == "engine" else f"{self.role}.engine"

    def options(self, config: ServingConfig) -> dict[str, Any]:
        """vLLM's, without those of one kind of engine."""
        return {
            **config.vllm,
            **fixed_options(on_cpu=config.on_cpu),
            "model": self.model_path,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "seed": self.seed,
            "tensor_parallel_size": config.tensor_parallel_size,
        }


class ServedEngine:
    """What engines of every kind share: a vLLM that serves one model, from start to shutdown."""

    def __init__(
        self,
        config: ServingConfig,
        *,
        model_path: str,
        dtype: str,
        max_model_len: int,
        role: str,
        rank: int,
        seed: int,
    ) -> None:
        """`role` and `rank` name it in messages; `seed` is the run's."""
        self.config = config
        self._served = Served(role, rank, model_path, dtype, max_model_len, seed)
        self._name = self._served.name
        self._backend: Backend | None = None

    @property
    def _live(self) -> Backend:
        if self._backend is None:
            raise EngineError(f"{self._name} was not started")
        return self._backend

    async def memory(self) -> dict[str, float]:
        """What its processes take of the host, see rlpost.memory.family_memory."""
        return family_memory()

    async def shutdown(self) -> None:
        if self._backend is not None:
            await self._backend.shutdown()


async def started(config: ServingConfig, served: Served, options: dict[str, Any]) -> Backend:
    """vLLM in the layout that `config` asks for.

    Raises EngineError, ConfigError for an option that vLLM does not have.
    """
    refuse_unknown(config.vllm)
    kind = InProcess if config.layout == "in_process" else OwnProcesses
    backend: Backend = kind(options, name=served.name)
    try:
        await asyncio.wait_for(backend.start(), config.start_deadline_s)
    except TimeoutError as error:
        raise EngineError(
            f"{served.name} did not start within {served.section}.start_deadline_s "
            f"({config.start_deadline_s:g} s)"
        ) from error
    except Exception as error:
        raise EngineError(f"{served.name} can't serve {served.model_path}: {error}") from error
    return backend
