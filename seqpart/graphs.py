"""Graphs that outlive a partition's visit to the device.

Autograd saves weights for backward as views of the slot, and the slot will hold another partition before backward comes.
So in place of each such tensor its place in the slot is saved, and backward finds the same bytes there in the slot of
the partition's next visit. Activations are saved as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a slot a tensor lies: `offset` in bytes."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def on(self, buffer: torch.Tensor) -> torch.Tensor:
        first = (buffer.storage_offset() + self.offset) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return empty.set_(buffer.untyped_storage(), first, self.shape, self.stride)


def packing(buffer: torch.Tensor, buffer_now: Callable[[], torch.Tensor | None]) -> torch.autograd.graph.saved_tensors_hooks:
    """Inside, autograd saves a place instead of a view of `buffer`; it is looked up in `buffer_now()` when it is needed."""
    storage, start = buffer.untyped_storage().data_ptr(), buffer.storage_offset()

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != storage:
            return tensor
        offset = int(tensor.storage_offset()) * tensor.dtype.itemsize - int(start)
        return _Place(offset, tensor.shape, tensor.stride(), tensor.dtype)

    def unpack(packed: Any) -> torch.Tensor:
        now = buffer_now() if isinstance(packed, _Place) else None
        tensor: torch.Tensor = packed if now is None else packed.on(now)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
