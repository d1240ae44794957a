"""Whether ranks can share a model evenly."""

from __future__ import annotations


def uneven_cuts(
    *, num_heads: int, intermediate_size: int, num_layers: int, tp: int, pp: int
) -> list[str]:
    """One line for each size that `tp` or `pp` ranks can't share, with the next smaller number.

    >>> uneven_cuts(num_heads=9, intermediate_size=1536, num_layers=30, tp=2, pp=1)
    ["tensor_parallel (2) must divide the model's num_attention_heads (9); try 1"]
    """
    sizes = (
        ("num_attention_heads", num_heads, "tensor", tp),
        ("intermediate_size", intermediate_size, "tensor", tp),
        ("num_hidden_layers", num_layers, "pipeline", pp),
    )
    return [
        f"{axis}_parallel ({ranks}) must divide the model's {key} ({size}); try "
        f"{max(n for n in range(1, ranks) if size % n == 0)}"
        for key, size, axis, ranks in sizes
        if size % ranks
    ]
