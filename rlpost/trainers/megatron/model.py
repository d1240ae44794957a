"""This rank's part of a Megatron GPT model, described by a Hugging Face configuration.

Letters: T packed tokens, H hidden size, V padded vocabulary.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from rlpost.errors import ConfigError, ModelError
from rlpost.trainers.megatron import device
from rlpost.trainers.megatron.attention import PackedAttention, packed

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")

# What a user may set are Megatron's speed and memory options; these shape the model or would have
# no effect on this model's layers.
_NOT_OPTIONS = frozenset(
    {"window_size", "window_attn_skip_freq", "softmax_type", "attention_softmax_in_fp32"}
    | {"apply_query_key_layer_scaling", "softmax_scale", "fp16", "mtp_num_layers"}
    | {"context_parallel_size", "virtual_pipeline_model_parallel_size", "moe_grouped_gemm"}
    | {"expert_model_parallel_size", "expert_tensor_parallel_size", "attention_backend"}
    | {"use_cpu_initialization", "init_method", "output_layer_init_method", "init_method_std"}
)


def init_parallel(*, tp: int, pp: int, seed: int) -> None:
    """Cuts the initialised process group into tensor-, pipeline- and data-parallel groups."""
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(seed)


def padded_vocab(vocab_size: int, *, multiple: int, tp: int) -> int:
    """Rows of the embedding over all ranks: `vocab_size` rounded up to `multiple` x `tp`."""
    step = multiple * tp
    return (vocab_size + step - 1) // step * step


def check_supported(hf_config: Any) -> None:
    """Raises ModelError naming the key of config.json that this trainer can't honour."""
    kind = hf_config.model_type
    if kind not in SUPPORTED:
        raise ModelError(
            f"model_type {kind!r} is not supported; choose from {', '.join(SUPPORTED)}"
        )
    rope = rope_parameters(hf_config)
    required = {
        "hidden_act": (hf_config.hidden_act, "silu"),
        "rope_parameters.rope_type": (rope.get("rope_type", "default"), "default"),
        "rope_parameters.partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
        "use_sliding_window": (bool(getattr(hf_config, "use_sliding_window", False)), False),
        "attention_bias": (bool(getattr(hf_config, "attention_bias", False)), False),
        "mlp_bias": (bool(getattr(hf_config, "mlp_bias", False)), False),
        "attention_dropout": (float(hf_config.attention_dropout), 0.0),
    }
    if kind == "qwen3_moe":
        required["decoder_sparse_step"] = (hf_config.decoder_sparse_step, 1)
        required["mlp_only_layers"] = (list(hf_config.mlp_only_layers), [])
    for key, (value, allowed) in required.items():
        if value != allowed:
            raise ModelError(
                f"{key} = {value!r} in the model's config.json is not supported for {kind}; "
                f"only {allowed!r} is. Choose another model."
            )


def rope_parameters(hf_config: Any) -> Mapping[str, Any]:
    """Rotary settings; transformers 5 keeps `rope_theta` here."""
    parameters: Mapping[str, Any] = hf_config.rope_parameters
    return parameters


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


def _rank_options(dtype: torch.dtype) -> dict[str, Any]:
    """TransformerConfig fields that follow from the ranks and the precision."""
    return {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
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
    """Starting values of what the user may set. Fusions need Apex, Transformer Engine or a compiler."""
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


def option_problems(options: Mapping[str, Any]) -> list[str]:
    """One line for each option that Megatron doesn't know or that is not the user's to set."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    problems = []
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(f"{name!r} is not an option of Megatron's TransformerConfig{hint}")
    return problems


def transformer_config(
    hf_config: Any, *, dtype: torch.dtype, options: Mapping[str, Any]
) -> TransformerConfig:
    """Raises ModelError for an unsupported model, ConfigError for options that can't be honoured."""
    check_supported(hf_config)
    fixed = _shape_options(hf_config) | _rank_options(dtype)
    problems = option_problems(options)
    problems += [
        f"option {name!r} is derived from the model and the parallel layout; remove it"
        for name in options
        if name in fixed or name in _NOT_OPTIONS
    ]
    merged = _default_options() | dict(options)
    if "num_moe_experts" in fixed and fixed["tensor_model_parallel_size"] > 1:
        if not merged.get("sequence_parallel", False):
            problems.append(
                "a mixture of experts with tensor parallelism needs sequence_parallel: true"
            )
    if problems:
        raise ConfigError(problems)
    try:
        return TransformerConfig(**merged, **fixed)
    except (ValueError, AssertionError) as error:
        raise ConfigError([f"Megatron refuses options {dict(options)}: {error}"]) from error


class RMSNorm(torch.nn.RMSNorm):
    """Torch's norm, marked so that sequence parallelism sums its gradient over ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device.device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Backend(LocalSpecProvider):  # type: ignore[misc]
    """Megatron's plain torch layers with our norm and our packed attention."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedAttention


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    backend = Backend()
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    layer = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=ModuleSpec(
            SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=get_mlp_module_spec_for_backend(backend=backend, num_experts=config.num_moe_experts),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(TransformerLayer, submodules=layer)


def build_model(
    hf_config: Any, *, dtype: torch.dtype, options: Mapping[str, Any], vocab_multiple: int
) -> GPTModel:
    """This rank's stage, weights not loaded yet (see converter.load_hf).

    The last stage returns hidden states [1, T, H] instead of logits; `output_weight` is the head.
    """
    config = transformer_config(hf_config, dtype=dtype, options=options)
    layers = [_layer_spec(config)] * get_num_layers_to_build(config)
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
        vocab_size=padded_vocab(
            hf_config.vocab_size, multiple=vocab_multiple, tp=config.tensor_model_parallel_size
        ),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=rope_parameters(hf_config)["rope_theta"],
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        parallel_output=True,
    )
    model.to(device=device.device(), dtype=dtype)
    _mark_tensor_parallel(model)
    if model.post_process:
        _pass_hidden_states(model)
    return model


def _mark_tensor_parallel(model: GPTModel) -> None:
    """Weights that were not initialised carry no sharding marks; unmarked shards of all but the
    first tensor-parallel rank would silently be left out of the gradient norm."""
    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        dim = dims.get(type(module))
        weight = getattr(module, "weight", None)
        if dim is not None and weight is not None and not hasattr(weight, "partition_dim"):
            set_tensor_model_parallel_attributes(weight, True, dim, 1)


def _pass_hidden_states(model: GPTModel) -> None:
    """Replaces the head's forward by one that hands the hidden states on, all T tokens of them."""
    config = model.config

    def forward(
        hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None
    ) -> tuple[torch.Tensor, None]:
        if config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden, None

    model.output_layer.forward = forward


def output_weight(model: GPTModel) -> torch.Tensor:
    """[V / tp, H] this rank's rows of the head; rank r owns ids from r * V / tp. Last stage only."""
    if model.share_embeddings_and_output_weights:
        weight: torch.Tensor = model.shared_embedding_or_output_weight()
        return weight
    return model.output_layer.weight  # type: ignore[no-any-return]


def forward_packed(model: Any, token_ids_T: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Runs one stage on packed sequences -> [1, T, H] on the last stage.

    Gradients: the hidden states are the same on all tensor-parallel ranks. Whoever multiplies them
    with `output_weight` must sum the gradient of the hidden states over the tensor-parallel ranks,
    with and without sequence parallelism.
    """
    hidden: torch.Tensor = model(token_ids_T[None], None, None, packed_seq_params=packed(lengths))
    return hidden


def logits(model: GPTModel, hidden_T: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[T, H] -> full logits [T, vocab_size], collective over tensor parallel. For small models."""
    shard = hidden_T @ output_weight(model).t()
    return gather_from_tensor_model_parallel_region(shard)[:, :vocab_size]  # type: ignore[no-any-return]
