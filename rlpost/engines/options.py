"""Which vLLM options a user may give, and the environment vLLM's processes need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rlpost.errors import ConfigError
from rlpost.wording import nearest

# Options that rlpost sets itself, or that would make its guarantees untrue, with the reason.
RESERVED = {
    "model": "it is model.path",
    "tokenizer": "engines see token ids only",
    "skip_tokenizer_init": "engines see token ids only",
    "dtype": "it is model.dtype",
    "max_model_len": "it is model.max_length",
    "seed": "every request carries its own seed, derived from the run's",
    "tensor_parallel_size": "it is engine.tensor_parallel_size",
    "pipeline_parallel_size": "weight updates address tensor-parallel ranks only",
    "data_parallel_size": "it is engine.num_engines",
    "enable_expert_parallel": "weights could not be read back for verification",
    "quantization": "weights could not be read back for verification",
    "logprobs_mode": "training needs the log-probs of the distribution that was sampled from",
    "generation_config": "stop tokens are read from the model folder by rlpost",
    "worker_extension_cls": "rlpost's own extension loads and reads back the weights",
    "weight_transfer_config": "the weight_sync group moves weights",
    "enable_sleep_mode": "it follows num_gpus_per_engine",
    "enable_lora": "no adapter would ever be delivered: the weight_sync group sends whole weights",
    "runner": "an engine generates",
    "disable_log_stats": "use the engine's stats()",
}

# Options that the plan of memory counts with, and the largest number of each.
COUNTED = {
    "kv_cache_memory_bytes": math.inf,
    "gpu_memory_utilization": 1.0,
    "max_num_seqs": math.inf,
}


def fixed_options(*, on_cpu: bool) -> dict[str, Any]:
    """What every engine of rlpost is started with, whatever the model."""
    return {
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rlpost.engines.extension.WorkerExtension",
        "enable_sleep_mode": not on_cpu,
        "disable_log_stats": True,
    }


def refuse_reserved(options: Mapping[str, Any]) -> None:
    """Raises ValueError naming every reserved option and its reason."""
    taken = [f"engine.vllm.{key} ({RESERVED[key]})" for key in options if key in RESERVED]
    if taken:
        raise ValueError(f"remove options that rlpost sets itself: {'; '.join(taken)}")


def refuse_no_numbers(options: Mapping[str, Any]) -> None:
    """Raises ValueError for an option that is counted with and holds no number above 0."""
    for key, largest in COUNTED.items():
        value = options.get(key)
        if value is not None and not (type(value) in (int, float) and 0 < value <= largest):
            most = f" and at most {largest:g}" if math.isfinite(largest) else ""
            raise ValueError(f"engine.vllm.{key} ({value!r}) must be a number above 0{most}")


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raises ConfigError with the nearest name for options this vLLM does not have."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in fields(AsyncEngineArgs)]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ConfigError(
            [f"engine.vllm.{key}: vLLM has no such option{nearest(key, known)}" for key in unknown]
        )


def environment(
    *, on_cpu: bool, in_process: bool, threads: int, tensor_parallel_size: int
) -> dict[str, str]:
    """Variables of the worker process, to be set before it imports anything."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": str(threads),
    }
    if on_cpu:
        # vLLM compiles one sampling function even in eager mode: 5 to 25 s for the first answer.
        variables["TORCH_COMPILE_DISABLE"] = "1"
        # Spinning OpenMP threads on shared cores cost a factor of ten.
        variables["OMP_WAIT_POLICY"] = "PASSIVE"
    if on_cpu or in_process:
        # in_process needs it; elsewhere on a CPU each process saved is ten seconds of imports.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if on_cpu and tensor_parallel_size > 1:
        # vLLM's automatic binding wants a NUMA node per rank.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return variables
