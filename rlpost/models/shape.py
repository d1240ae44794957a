"""The sizes of a decoder, and how many parameters follow from them. Plain arithmetic; no torch.

Letters: H hidden size, F width of the MLP, q and kv widths of all query and of all key heads,
tp and pp the ranks over which layers, and the stack of layers, are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Head = Literal["logits", "value", "labels"]

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
NUM_OUTPUTS = {"value": 1, "labels": 2}


@dataclass(frozen=True)
class Cut:
    """Which share of a model a rank holds.

    `vocab_multiple`: the vocabulary is rounded up to a multiple of it times tp.
    """

    tp: int = 1
    pp: int = 1
    stage: int = 0
    vocab_multiple: int = 1

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pp - 1


@dataclass(frozen=True)
class ModelShape:
    """What config.json says of a model's sizes.

    SmolLM2-135M: 30 layers, H 576, F 1536, 9 query and 3 key heads of 64, 49152 tied rows.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    projection_bias: bool
    mlp_bias: bool
    head_norms: bool
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    dense_layers: tuple[int, ...] = ()  # of a mixture: those with a plain MLP

    @property
    def q(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.num_key_value_heads * self.head_dim

    def num_parameters(self, head: Head = "logits", cut: Cut = Cut()) -> int:
        """Of the part that one rank holds; of the whole model without a cut."""
        total = sum(self._layer(layer, cut) for layer in self.layers(cut))
        if cut.is_first:
            total += self._rows(cut) * self.hidden_size
        return total + (self._end(head, cut) if cut.is_last else 0)

    def layers(self, cut: Cut) -> range:
        """Layers of the stage; what does not divide evenly goes to the last one."""
        each = self.num_layers // cut.pp
        end = self.num_layers if cut.is_last else (cut.stage + 1) * each
        return range(cut.stage * each, end)

    def _rows(self, cut: Cut) -> int:
        """Rows of the vocabulary on one rank."""
        step = cut.vocab_multiple * cut.tp
        return -(-self.vocab_size // step) * step // cut.tp

    def _end(self, head: Head, cut: Cut) -> int:
        """Final norm and head. A tied head is a copy where another stage has the embedding."""
        norm = self.hidden_size
        if head != "logits":
            return norm + NUM_OUTPUTS[head] * (self.hidden_size + 1)
        shared = self.tied and cut.is_first
        return norm + (0 if shared else self._rows(cut) * self.hidden_size)

    def _layer(self, layer: int, cut: Cut) -> int:
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.head_norms else 0)
        return norms + self._attention(cut) + self._mlp(layer, cut)

    def _attention(self, cut: Cut) -> int:
        qkv = self.q + 2 * self.kv
        split = self.hidden_size * (qkv + self.q) + (qkv if self.qkv_bias else 0)
        return split // cut.tp + (self.hidden_size if self.projection_bias else 0)

    def _mlp(self, layer: int, cut: Cut) -> int:
        hidden, wide = self.hidden_size, self.intermediate_size
        if self.num_experts and layer not in self.dense_layers:
            experts = 3 * hidden * self.expert_size * self.num_experts
            return experts // cut.tp + hidden * self.num_experts  # the router is whole everywhere
        split = 3 * hidden * wide + (2 * wide if self.mlp_bias else 0)
        return split // cut.tp + (hidden if self.mlp_bias else 0)


def shape_of(settings: Mapping[str, Any]) -> ModelShape | None:
    """From the content of config.json; None for a family that is not counted here."""
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        return None
    heads = int(settings["num_attention_heads"])
    bias = bool(settings.get("attention_bias", False))
    return ModelShape(
        num_layers=settings["num_hidden_layers"],
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"],
        num_heads=heads,
        num_key_value_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
        vocab_size=settings["vocab_size"],
        tied=bool(settings.get("tie_word_embeddings", False)),
        qkv_bias=bias or kind == "qwen2",
        projection_bias=bias and kind != "qwen2",
        mlp_bias=bool(settings.get("mlp_bias", False)),
        head_norms=kind in ("qwen3", "qwen3_moe"),
        **(_mixture(settings) if kind == "qwen3_moe" else {}),
    )


def _mixture(settings: Mapping[str, Any]) -> dict[str, Any]:
    dense: Iterable[int] = settings.get("mlp_only_layers") or ()
    every = settings.get("decoder_sparse_step", 1)
    sparse = [n for n in range(settings["num_hidden_layers"]) if (n + 1) % every == 0]
    plain = set(range(settings["num_hidden_layers"])) - set(sparse) | set(dense)
    return {
        # transformers 5 writes the other name.
        "num_experts": settings.get("num_experts") or settings["num_local_experts"],
        "experts_per_token": settings["num_experts_per_tok"],
        "expert_size": settings["moe_intermediate_size"],
        "dense_layers": tuple(sorted(plain)),
    }
