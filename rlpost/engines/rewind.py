"""Seeded sampling on the CPU when vLLM throws a sampled token away.

After a prefill that did not finish (a long prompt in parts, or a request that is computed again
after an update) vLLM drops the token it sampled and turns the request's generator back by one draw,
by an offset that only CUDA generators have: on a CPU the engine dies with "CPU Generator does not
use offset". Here the generator's state is kept from before the draw and put back instead, so a
seed gives the same tokens however its prompt was cut.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def rewind_by_state() -> None:
    """Patches vLLM's model runner; running it twice is harmless."""
    if getattr(GPUModelRunner, "_rlpost_rewinds", False):
        return
    GPUModelRunner._rlpost_rewinds = True
    GPUModelRunner._sample = _restoring(GPUModelRunner._sample)
    GPUModelRunner._bookkeeping_sync = _hiding(GPUModelRunner._bookkeeping_sync)


def _restoring(sample: Any) -> Any:
    @functools.wraps(sample)
    def wrapper(runner: Any, *args: Any, **kwargs: Any) -> Any:
        states = {row: gen.get_state() for row, gen in _thrown_away(runner).items()}
        result = sample(runner, *args, **kwargs)
        for row, state in states.items():
            runner.input_batch.generators[row].set_state(state)
        return result

    return wrapper


def _hiding(bookkeeping: Any) -> Any:
    """vLLM turns back the generators it finds here; those are turned back already."""

    @functools.wraps(bookkeeping)
    def wrapper(runner: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = _thrown_away(runner)
        generators = runner.input_batch.generators
        for row in hidden:
            del generators[row]
        try:
            return bookkeeping(runner, *args, **kwargs)
        finally:
            generators.update(hidden)

    return wrapper


def _thrown_away(runner: Any) -> dict[int, Any]:
    """Row -> generator, of the requests whose token of this step will be dropped."""
    batch = runner.input_batch
    rows = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
    return {row: batch.generators[row] for row in rows if row in batch.generators}
