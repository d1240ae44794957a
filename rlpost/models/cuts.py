"""Whether ranks can share a model evenly."""

from __future__ import annotations


def uneven_cuts(
    *,
    num_heads: int,
    num_key_value_heads: int,
    intermediate_size: int,
    num_layers: int,
    tp: int,
    pp: int,
) -> list[str]:
    """One line for each size that `tp` or `pp` ranks can't share, with the next smaller number.

    SmolLM2's 9 query heads on 2 ranks, where `sizes` are those of its layers:

    >>> uneven_cuts(num_heads=9, num_key_value_heads=3, **sizes, tp=2, pp=1)
    ["tensor_parallel (2) must divide the model's num_attention_heads (9); try 1", ...]
    """
    sizes = (
        ("num_attention_heads", num_heads, "tensor", tp),
        ("intermediate_size", intermediate_size, "tensor", tp),
        ("num_hidden_layers", num_layers, "pipeline", pp),
    )
    problems = [
        f"{axis}_parallel ({ranks}) must divide the model's {key} ({size}); try "
        f"{max(n for n in range(1, ranks) if size % n == 0)}"
        for key, size, axis, ranks in sizes
        if size % ranks
    ]
    if not share_key_heads(num_key_value_heads, tp):
        fitting = max(n for n in range(1, tp) if share_key_heads(num_key_value_heads, n))
        problems.append(
            f"tensor_parallel ({tp}) must divide the model's num_key_value_heads "
            f"({num_key_value_heads}) or be a multiple of it; try {fitting}"
        )
    return problems


def share_key_heads(num_key_value_heads: int, tp: int) -> bool:
    """Each rank has some of them whole, or several ranks have a copy of one."""
    return num_key_value_heads % tp == 0 or tp % num_key_value_heads == 0
