"""This rank's part of a Megatron GPT model, described by a Hugging Face configuration.

Letters: T packed tokens, H hidden size, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
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
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
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

from rlpost.models.shape import Head
from rlpost.trainers.megatron import device
from rlpost.trainers.megatron.attention import PackedAttention, packed
from rlpost.trainers.megatron.model_config import rope_options, transformer_config


def init_parallel(*, tp: int, pp: int, seed: int) -> None:
    """Cuts the initialised process group into tensor-, pipeline- and data-parallel groups."""
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(seed)


def padded_vocab(vocab_size: int, *, multiple: int, tp: int) -> int:
    """Rows of the embedding over all ranks: `vocab_size` rounded up to `multiple` x `tp`."""
    step = multiple * tp
    return (vocab_size + step - 1) // step * step


class RMSNorm(torch.nn.RMSNorm):
    """Torch's norm, marked so that sequence parallelism sums its gradient over ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device.device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LinearHead(torch.nn.Module):
    """W h + b in float32, zero at first, in place of Megatron's language-model head.

    One output is the value of a state, several are a token's labels before the softmax.

    Every tensor-parallel rank has all of it and computes all outputs, so the gradients of W, b and
    of the hidden states are whole on each rank and nothing is summed over them.
    """

    def __init__(self, config: TransformerConfig, kind: Head, num_outputs: int) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.names = (f"{kind}_weight", f"{kind}_bias")
        weight, bias = torch.zeros(num_outputs, config.hidden_size), torch.zeros(num_outputs)
        self.register_parameter(self.names[0], torch.nn.Parameter(weight))
        self.register_parameter(self.names[1], torch.nn.Parameter(bias))

    def forward(
        self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None
    ) -> tuple[torch.Tensor, None]:
        """Hidden states [T, 1, H] (or this rank's cut of T) -> outputs [T, 1, num_outputs]."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        kept, bias = (getattr(self, name).float() for name in self.names)
        return torch.nn.functional.linear(hidden.float(), kept, bias), None


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
    hf_config: Any,
    *,
    dtype: torch.dtype,
    options: Mapping[str, Any],
    vocab_multiple: int,
    head: Head = "logits",
) -> GPTModel:
    """This rank's stage, weights not loaded yet (see converter.load_hf).

    With head `logits` the last stage returns hidden states [1, T, H] instead of logits;
    `output_weight` is the head. With `value` it returns values [1, T, 1] and has no vocabulary,
    with `labels` it returns [1, T, hf_config.num_labels].
    """
    config = transformer_config(
        hf_config,
        dtype=dtype,
        options=options,
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
    )
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
        **rope_options(hf_config),
        share_embeddings_and_output_weights=head == "logits" and hf_config.tie_word_embeddings,
        parallel_output=True,
    )
    if head != "logits" and model.post_process:
        num_outputs = 1 if head == "value" else hf_config.num_labels
        model.output_layer = LinearHead(config, head, num_outputs)
    model.to(device=device.device(), dtype=dtype)
    _mark_tensor_parallel(model)
    if head == "logits" and model.post_process:
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
    """[V / tp, H] this rank's rows of the head: rank r owns ids from r * V / tp. Last stage."""
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
