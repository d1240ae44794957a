"""A token classifier on vLLM's pooling runner: token ids in, raw outputs of every token out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import numpy as np

from rlpost.engines.backend import Backend
from rlpost.engines.jobs import Job
from rlpost.engines.serving import Served, ServingConfig, started
from rlpost.errors import EngineError
from rlpost.memory import family_memory
from rlpost.models.shape import Head
from rlpost.types import Array

TASK = "token_classify"


@dataclass(frozen=True)
class PoolingEngineConfig(ServingConfig):
    """The keys of every engine."""


class PoolingEngine:
    """Serves a fixed model: a `...ForTokenClassification` folder, or a process reward model.

    `classify` may be called any number of times at once; vLLM batches them. A dead vLLM fails all
    pending and later calls with EngineError.
    """

    Config = PoolingEngineConfig
    head: ClassVar[Head] = "labels"

    def __init__(
        self,
        config: PoolingEngineConfig,
        *,
        model_path: str,
        dtype: str,
        max_model_len: int,
        role: str,
        rank: int,
        seed: int,
    ) -> None:
        self.config = config
        self._served = Served(role, rank, model_path, dtype, max_model_len, seed)
        self._name = self._served.name
        self._backend: Backend | None = None
        self._ids = count()

    async def start(self) -> dict[str, float]:
        """Raises EngineError, ConfigError for an option that vLLM does not have."""
        begun = time.monotonic()
        self._backend = await started(self.config, self._served, self._options())
        return {"start": time.monotonic() - begun}

    async def classify(self, token_ids: Sequence[int]) -> Array:
        """[L, labels] float32 outputs before any softmax or sigmoid. Raises EngineError."""
        if self._backend is None:
            raise EngineError(f"{self._name} was not started")
        limit = self._served.max_model_len
        if not 0 < len(token_ids) <= limit:
            raise EngineError(
                f"{self._name}: {len(token_ids)} tokens; 1 to {limit} are possible "
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

    async def memory(self) -> dict[str, float]:
        return family_memory()

    async def shutdown(self) -> None:
        if self._backend is not None:
            await self._backend.shutdown()

    def _options(self) -> dict[str, Any]:
        from vllm.config import PoolerConfig

        options = self._served.options(self.config)
        del options["logprobs_mode"]
        pooler = PoolerConfig(task=TASK, use_activation=False)
        return {**options, "runner": "pooling", "pooler_config": pooler}
