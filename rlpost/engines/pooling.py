"""A token classifier on vLLM's pooling runner: token ids in, raw outputs of every token out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import numpy as np

from rlpost.engines.jobs import Job
from rlpost.engines.serving import ServedEngine, ServingConfig, started
from rlpost.errors import EngineError
from rlpost.models.shape import Head
from rlpost.types import Array

TASK = "token_classify"


@dataclass(frozen=True)
class PoolingEngineConfig(ServingConfig):
    """The keys of every engine."""


class PoolingEngine(ServedEngine):
    """Serves a fixed model: a `...ForTokenClassification` folder, or a process reward model.

    `classify` may be called any number of times at once; vLLM batches them. A dead vLLM fails all
    pending and later calls with EngineError.
    """

    Config = PoolingEngineConfig
    head: ClassVar[Head] = "labels"

    def __init__(self, config: PoolingEngineConfig, **model: Any) -> None:
        """`model`: see ServedEngine."""
        super().__init__(config, **model)
        self._ids = count()

    async def start(self) -> dict[str, float]:
        """Raises EngineError, ConfigError for an option that vLLM does not have."""
        begun = time.monotonic()
        self._backend = await started(self.config, self._served, self._options())
        return {"start": time.monotonic() - begun}

    async def classify(self, token_ids: Sequence[int]) -> Array:
        """[L, labels] float32 outputs before any softmax or sigmoid. Raises EngineError."""
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
        await self._live.add([job])
        output = await job.answer
        outputs: Array = output.outputs.data.float().cpu().numpy().astype(np.float32)
        return outputs

    def _options(self) -> dict[str, Any]:
        from vllm.config import PoolerConfig

        options = self._served.options(self.config)
        del options["logprobs_mode"]
        pooler = PoolerConfig(task=TASK, use_activation=False)
        return {**options, "runner": "pooling", "pooler_config": pooler}
