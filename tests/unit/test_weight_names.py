"""Names and row layouts of the Hugging Face <-> Megatron converter."""

from __future__ import annotations

import pytest
import torch

from rlpost.errors import ModelError
from rlpost.trainers.megatron.weight_names import Mapped, map_name, merge_qkv, split_qkv


def test_layers_of_a_later_stage_keep_their_global_number() -> None:
    mapped = map_name("decoder.layers.1.mlp.linear_fc1.weight", first_layer=4, tied=False)
    names = ("model.layers.5.mlp.gate_proj.weight", "model.layers.5.mlp.up_proj.weight")
    assert mapped == Mapped("glu", names)


def test_experts_are_named_one_by_one() -> None:
    name = "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight"
    mapped = map_name(name, first_layer=0, tied=False)
    assert mapped == Mapped("plain", ("model.layers.0.mlp.experts.3.down_proj.weight",))


@pytest.mark.parametrize(
    ("tied", "source"), [(True, "model.embed_tokens.weight"), (False, "lm_head.weight")]
)
def test_a_tied_head_is_made_of_the_embedding(tied: bool, source: str) -> None:
    assert map_name("output_layer.weight", first_layer=0, tied=tied) == Mapped("vocab", (source,))


@pytest.mark.parametrize("name", ["decoder.layers.0.mlp.unheard_of.weight", "unheard_of.weight"])
def test_unknown_parameter_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=name):
        map_name(name, first_layer=0, tied=False)


def test_qkv_rows_lie_per_query_group() -> None:
    # Two groups of two query heads, head size 1: rows are numbered q 0..3, k 10..11, v 20..21.
    parts = [torch.arange(4)[:, None], torch.tensor([[10], [11]]), torch.tensor([[20], [21]])]
    merged = merge_qkv(parts, 2)
    assert merged.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    back = split_qkv(merged, num_groups=2, heads_per_group=2)
    assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))


def test_qkv_biases_round_trip() -> None:
    parts = [torch.randn(12), torch.randn(6), torch.randn(6)]
    back = split_qkv(merge_qkv(parts, 3), num_groups=3, heads_per_group=2)
    assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))
