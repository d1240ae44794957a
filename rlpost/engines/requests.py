"""Our requests in vLLM's words, and vLLM's answers in ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rlpost.errors import EngineError
from rlpost.types import FinishReason, GenerateRequest, Generation

SEED_MASK = (1 << 63) - 1  # vLLM's generators take non-negative int64 seeds


def sampling_params(request: GenerateRequest, stop_token_ids: list[int]) -> Any:
    """SamplingParams that report the sampled token's log-prob and every token up to the stop."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        max_tokens=request.sampling.max_tokens,
        seed=request.seed & SEED_MASK,
        stop_token_ids=stop_token_ids,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> Any:
    """SamplingParams that score the prompt; one token is sampled because vLLM wants one."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def generation(request_id: str, output: Any) -> Generation:
    """Raises EngineError when vLLM's answer lacks log-probs or version labels."""
    completion = output.outputs[0]
    token_ids = np.asarray(completion.token_ids, dtype=np.int32)
    return Generation(
        request_id=request_id,
        token_ids=token_ids,
        logprobs=_sampled_logprobs(request_id, completion.logprobs, token_ids),
        policy_versions=_versions(request_id, completion.weight_versions, len(token_ids)),
        finish_reason=_finish_reason(request_id, completion.finish_reason),
    )


def prompt_logprobs(output: Any) -> list[float]:
    """log p(token_t | before) for t >= 1; position 0 has none."""
    flat = output.prompt_logprobs
    return [flat.logprobs[start] for start in flat.start_indices[1:]]


def _sampled_logprobs(request_id: str, flat: Any, token_ids: Any) -> Any:
    values = flat.logprobs if flat is not None else []
    if len(values) != len(token_ids) or list(flat.token_ids if flat else []) != token_ids.tolist():
        raise EngineError(
            f"request {request_id!r}: {len(token_ids)} tokens came with {len(values)} log-probs"
        )
    return np.asarray(values, dtype=np.float32)


def _versions(request_id: str, spans: Any, length: int) -> Any:
    versions = np.full(length, -1, dtype=np.int32)
    for span in spans or []:
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise EngineError(f"request {request_id!r}: tokens without a policy version")
    return versions


def _finish_reason(request_id: str, reason: str | None) -> FinishReason:
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"request {request_id!r} ended with finish_reason {reason!r}")
    return reason  # type: ignore[return-value]


def stop_token_ids(model_path: str) -> list[int]:
    """End-of-sequence ids of a model folder: those of its generation config (else its config),
    and its tokenizer's eos token. Raises EngineError if the folder names none."""
    folder = Path(model_path)
    ids = _eos_of(folder / "generation_config.json") or _eos_of(folder / "config.json")
    ids |= _eos_of_tokenizer(folder)
    if not ids:
        raise EngineError(
            f"model folder {model_path} names no eos_token_id in generation_config.json, "
            "config.json or its tokenizer: answers could never stop; add one"
        )
    return sorted(ids)


def _eos_of(path: Path) -> set[int]:
    value = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def _eos_of_tokenizer(folder: Path) -> set[int]:
    if not (folder / "tokenizer_config.json").exists():
        return set()
    from transformers import AutoTokenizer

    token_id = AutoTokenizer.from_pretrained(folder, local_files_only=True).eos_token_id
    return set() if token_id is None else {int(token_id)}
