"""The norm of all gradients as `torch.nn.utils.clip_grad_norm_` adds it up, from norms that are known one by one.

torch groups gradients by device and type and adds group after group, in the order of a hash table of its own: neither the first
that comes nor the last (torch 2.14: float32, float64, bfloat16 as float64, bfloat16, float32; float32, bfloat16, float64 too).
Another order rounds otherwise, so the order is asked of torch itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """Of one gradient."""

    norm: torch.Tensor
    dtype: torch.dtype
    """The gradient's; the norm of a complex one is real."""

    @classmethod
    def of(cls, gradient: torch.Tensor) -> "GradientNorm":
        return cls(torch.linalg.vector_norm(gradient), gradient.dtype)


def total_norm(norms: Sequence[GradientNorm]) -> torch.Tensor | None:
    """The norm of all gradients, a scalar, of norms in the order of the model's parameters; None where there are none."""
    if not norms:
        return None
    order: Sequence[int] = range(len(norms))
    if len({one.dtype for one in norms}) > 1:
        like: list[torch.Tensor | None] = [torch.empty(0, dtype=one.dtype, device=one.norm.device) for one in norms]
        groups = _group_tensors_by_device_and_dtype([like], with_indices=True)
        order = [place for _, places in groups.values() for place in places]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norms[place].norm for place in order]))
    return total
