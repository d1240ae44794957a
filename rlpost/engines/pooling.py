"""A token classifier on vLLM's pooling runner: token ids in, raw outputs of every token out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from rlpost.engines.async_llm import OwnProcesses
from rlpost.engines.backend import Backend
from rlpost.engines.inprocess import InProcess
from rlpost.engines.jobs import Job
from rlpost.engines.options import fixed_options, refuse_unknown
from rlpost.engines.vllm import VllmEngineConfig
from rlpost.errors import EngineError
from rlpost.types import Array

TASK = "token_classify"


@dataclass(frozen=True)
class PoolingEngineConfig(VllmEngineConfig):
    """The same keys as an engine that generates."""


class PoolingEngine:
    """Serves a fixed model: a `...ForTokenClassification` folder, or a process reward model.

    `classify` may be called any number of times at once; vLLM batches them. A dead vLLM fails all
    pending and later calls with EngineError.
    """

    Config = PoolingEngineConfig

    def __init__(
        self,
        config: PoolingEngineConfig,
        *,
        model_path: str,
        dtype: str,
        max_model_len: int,
        rank: int,
        seed: int,
    ) -> None:
        self.config = config
        self._model_path = model_path
        self._dtype = dtype
        self._max_model_len = max_model_len
        self._seed = seed
        self._name = f"prm[{rank}]"
        self._backend: Backend | None = None
        self._ids = count()

    async def start(self) -> dict[str, float]:
        """Raises EngineError, ConfigError for an option that vLLM does not have."""
        started = time.monotonic()
        refuse_unknown(self.config.vllm)
        kind = InProcess if self.config.layout == "in_process" else OwnProcesses
        backend: Backend = kind(self._options(), name=self._name)
        try:
            await asyncio.wait_for(backend.start(), self.config.start_deadline_s)
        except TimeoutError as error:
            raise EngineError(
                f"{self._name} did not start within prm.engine.start_deadline_s "
                f"({self.config.start_deadline_s:g} s)"
            ) from error
        except Exception as error:
            raise EngineError(
                f"{self._name} can't serve {self._model_path} as a token classifier: {error}"
            ) from error
        self._backend = backend
        return {"start": time.monotonic() - started}

    async def classify(self, token_ids: Sequence[int]) -> Array:
        """[L, labels] float32 outputs before any softmax or sigmoid. Raises EngineError."""
        if self._backend is None:
            raise EngineError(f"{self._name} was not started")
        if not 0 < len(token_ids) <= self._max_model_len:
            raise EngineError(
                f"{self._name}: {len(token_ids)} tokens; 1 to {self._max_model_len} are possible "
                "(prm.model.max_length)"
            )
        from vllm import PoolingParams

        job = Job(
            f"classify/{next(self._ids)}",
            list(token_ids),
            PoolingParams(task=TASK, use_activation=False),
            asyncio.get_running_loop().create_future(),
        )
        await self._backend.add([job])
        output = await job.answer
        outputs: Array = output.outputs.data.float().cpu().numpy().astype(np.float32)
        return outputs

    async def shutdown(self) -> None:
        if self._backend is not None:
            await self._backend.shutdown()

    def _options(self) -> dict[str, Any]:
        from vllm.config import PoolerConfig

        fixed = fixed_options(on_cpu=self.config.on_cpu)
        del fixed["logprobs_mode"]
        return {
            **self.config.vllm,
            **fixed,
            "runner": "pooling",
            "pooler_config": PoolerConfig(task=TASK, use_activation=False),
            "model": self._model_path,
            "dtype": self._dtype,
            "max_model_len": self._max_model_len,
            "seed": self._seed,
            "tensor_parallel_size": self.config.tensor_parallel_size,
        }
