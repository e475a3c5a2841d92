"""What tells kinds of modules apart without running them."""

from collections.abc import Mapping
from types import FunctionType

import torch
from torch import nn

Kind = tuple[object, ...]
_NUMBERS = frozenset({"layer_idx", "layer_index", "layer_id", "layer_number", "block_idx", "training"})
"""Settings that tell layers which are alike apart: their own numbers."""


def structure_of(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Kind:
    """Types, plain settings, and the tensors' names and shapes; and what a module says of itself as its `structure`."""
    shapes = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors.items())
    said = getattr(module, "structure", None)
    return tuple((type(part), _settings(part)) for part in module.modules()), shapes, said if isinstance(said, tuple) else ()


def _settings(module: nn.Module) -> Kind:
    return tuple((name, repr(value)) for name, value in sorted(vars(module).items()) if name not in _NUMBERS and _plain(value))


def _plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_plain(part) for part in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | FunctionType)
