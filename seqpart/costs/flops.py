"""Floating point operations of products, convolutions and attention: by far the most of what networks compute.

Not torch.utils.flop_counter, which loads Triton: 6 MB and 0.2 s.
"""

from typing import Any

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def flops_of(operation: str, arguments: Any, result: Any) -> int:
    """Of one operation of a forward pass (an overload packet of `aten`); 0 for others, which move more than they compute."""
    if operation in _PRODUCTS:
        first, second = arguments[-2:]  # (..., m, k) and (..., k, n)
        return 2 * int(first.numel()) * int(second.shape[-1])
    if operation == "convolution":
        x, weight, transposed = arguments[0], arguments[1], arguments[6]
        places = x if transposed else result
        return 2 * int(places.numel()) * int(weight.numel() // weight.shape[0])
    if operation.startswith("_scaled_dot_product_"):
        query, key, value = arguments[:3]  # (..., positions, width)
        return 2 * int(query.numel() // query.shape[-1]) * int(key.shape[-2]) * int(query.shape[-1] + value.shape[-1])
    return 0
