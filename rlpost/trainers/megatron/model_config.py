"""What shapes a model: config.json, the parallel layout and the user's options; all checked."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from rlpost.errors import ConfigError, ModelError
from rlpost.models.cuts import uneven_cuts

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
# What Megatron's rotary embedding has built in for rope_type llama3; only `factor` is free.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# What a user may set are Megatron's speed and memory options; these shape the model or would have
# no effect on this model's layers.
_NOT_OPTIONS = frozenset(
    {"window_size", "window_attn_skip_freq", "softmax_type", "attention_softmax_in_fp32"}
    | {"apply_query_key_layer_scaling", "softmax_scale", "fp16", "mtp_num_layers"}
    | {"context_parallel_size", "virtual_pipeline_model_parallel_size", "moe_grouped_gemm"}
    | {"expert_model_parallel_size", "expert_tensor_parallel_size", "attention_backend"}
    | {"use_cpu_initialization", "init_method", "output_layer_init_method", "init_method_std"}
)


def check_supported(hf_config: Any) -> None:
    """Raises ModelError naming the key of config.json that this trainer can't honour."""
    kind = hf_config.model_type
    if kind not in SUPPORTED:
        raise ModelError(
            f"model_type {kind!r} is not supported; choose from {', '.join(SUPPORTED)}"
        )
    required: dict[str, tuple[Any, ...]] = {
        "hidden_act": (hf_config.hidden_act, "silu"),
        **_required_rope(rope_parameters(hf_config)),
        "use_sliding_window": (bool(getattr(hf_config, "use_sliding_window", False)), False),
        "attention_bias": (bool(getattr(hf_config, "attention_bias", False)), False),
        "mlp_bias": (bool(getattr(hf_config, "mlp_bias", False)), False),
        "attention_dropout": (float(hf_config.attention_dropout), 0.0),
    }
    if kind == "qwen3_moe":
        required["decoder_sparse_step"] = (hf_config.decoder_sparse_step, 1)
        required["mlp_only_layers"] = (list(hf_config.mlp_only_layers), [])
    for key, (value, *allowed) in required.items():
        if value not in allowed:
            raise ModelError(
                f"{key} = {value!r} in the model's config.json is not supported for {kind}; "
                f"only {' or '.join(map(repr, allowed))} is. Choose another model."
            )


def _required_rope(rope: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Key -> (value, what it may be) of the rotary settings."""
    kind = rope.get("rope_type", "default")
    required: dict[str, tuple[Any, ...]] = {
        "rope_parameters.rope_type": (kind, "default", "llama3"),
        "rope_parameters.partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
    }
    if kind == "llama3":
        for name, built_in in LLAMA3_ROPE.items():
            required[f"rope_parameters.{name}"] = (rope.get(name), built_in)
    return required


def rope_parameters(hf_config: Any) -> Mapping[str, Any]:
    """Rotary settings; transformers 5 keeps `rope_theta` here."""
    parameters: Mapping[str, Any] = hf_config.rope_parameters
    return parameters


def rope_options(hf_config: Any) -> dict[str, Any]:
    """Arguments of GPTModel for the rotary embedding.

    `llama3` stretches the slow frequencies by `factor` [Llama 3, arXiv:2407.21783].
    """
    rope = rope_parameters(hf_config)
    options: dict[str, Any] = {"rotary_base": rope["rope_theta"]}
    if rope.get("rope_type") == "llama3":
        options |= {"rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    return options


def head_dim(hf_config: Any) -> int:
    """Width of one attention head; Qwen3 sets it apart from hidden_size / heads."""
    explicit = getattr(hf_config, "head_dim", None)
    return int(explicit or hf_config.hidden_size // hf_config.num_attention_heads)


def _shape_options(hf_config: Any) -> dict[str, Any]:
    """TransformerConfig fields that follow from the model folder."""
    shape = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": head_dim(hf_config),
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf_config.model_type == "qwen2",
        "qk_layernorm": hf_config.model_type in ("qwen3", "qwen3_moe"),
        "attention_dropout": 0.0,
    }
    if hf_config.model_type == "qwen3_moe":
        shape |= {
            "num_moe_experts": hf_config.num_experts,
            "moe_router_topk": hf_config.num_experts_per_tok,
            "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
            # A softmax over the chosen logits equals a normalised softmax over all of them.
            "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        }
    return shape


def _rank_options(dtype: torch.dtype, tp: int, pp: int) -> dict[str, Any]:
    """TransformerConfig fields that follow from the ranks and the precision."""
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "perform_initialization": False,  # weights are always loaded
        # Packed batches differ in length; pipelines then need to exchange shapes, which Megatron
        # allows with this dispatcher only, for dense models too.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True,
    }


def _default_options() -> dict[str, Any]:
    """Where the user's options start. Fusions need Apex, Transformer Engine or a compiler."""
    return {
        "hidden_dropout": 0.0,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "batch_p2p_comm": False,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }


def transformer_config(
    hf_config: Any, *, dtype: torch.dtype, options: Mapping[str, Any], tp: int, pp: int
) -> TransformerConfig:
    """Raises ModelError for an unsupported model, ConfigError for an option it can't honour."""
    check_supported(hf_config)
    fixed = _shape_options(hf_config) | _rank_options(dtype, tp, pp)
    merged = _default_options() | dict(options)
    problems = _option_problems(options, fixed) + _layout_problems(hf_config, fixed, merged)
    if problems:
        raise ConfigError(problems)
    try:
        return TransformerConfig(**merged, **fixed)
    except (ValueError, AssertionError) as error:
        raise ConfigError([f"Megatron refuses options {dict(options)}: {error}"]) from error


def _option_problems(options: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[str]:
    """One line for each option that Megatron doesn't know or that is not the user's to set."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    problems = []
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(f"{name!r} is not an option of Megatron's TransformerConfig{hint}")
        elif name in fixed or name in _NOT_OPTIONS:
            problems.append(
                f"option {name!r} follows from the model and the parallel layout, or has no effect "
                "on it; remove it"
            )
    return problems


def _layout_problems(
    hf_config: Any, fixed: Mapping[str, Any], merged: Mapping[str, Any]
) -> list[str]:
    """One line for each size of the model that the ranks can't share evenly."""
    tp, pp = fixed["tensor_model_parallel_size"], fixed["pipeline_model_parallel_size"]
    split_asked_for = any("pipeline" in option for option in merged)  # Megatron checks it
    problems = uneven_cuts(
        num_heads=hf_config.num_attention_heads,
        num_key_value_heads=hf_config.num_key_value_heads,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        tp=tp,
        pp=1 if split_asked_for else pp,
    )
    if "num_moe_experts" in fixed and tp > 1 and not merged.get("sequence_parallel"):
        problems.append(
            "a mixture of experts with tensor parallelism needs option sequence_parallel: true"
        )
    return problems
