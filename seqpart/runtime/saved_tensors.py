"""Where a partition's graph begins, and graphs that outlive its visit to the device.

Autograd saves weights for backward as views of the slot, and the slot will hold another partition before backward comes.
So in place of each such tensor its place in the slot is saved, and backward finds the same bytes there in the slot of
the partition's next visit. Activations are saved as they are, or go to where the plan lets them wait, and buffers as they
were: each forward pass changes them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from seqpart.errors import ModelError
from seqpart.model.packs import Pack
from seqpart.runtime.graph_offload import GraphOffload, Look, Offloaded


@dataclass(slots=True)
class Arrival:
    """What backward brings to a partition's input."""

    gradient: torch.Tensor | None = None
    leaf: torch.Tensor | None = None
    """The input itself, which autograd's graph refers to."""

    def let_go(self) -> None:
        """Free the input's memory, where what the graph needs of it is saved elsewhere."""
        if self.leaf is not None:
            self.leaf.data = self.leaf.data.new_empty(0)


class _Entry(torch.autograd.Function):
    """Takes the gradient as it comes: a leaf's `grad` may lie in memory otherwise, and then kernels round otherwise."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        ctx.arrival = arrival
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.arrival.gradient = gradient
        return None, None


def entering(x: torch.Tensor, *, wants_gradient: bool) -> tuple[torch.Tensor, Arrival]:
    """`x` as the input of a graph of its own, and the place of its gradient."""
    x, arrival = x.detach(), Arrival()
    if wants_gradient:
        arrival.leaf = x.requires_grad_()
        x = _Entry.apply(arrival.leaf, arrival)
    return x, arrival


def apart_from(others: Iterable[int], gradients: Mapping[int, torch.Tensor]) -> Pack:
    """`gradients`, each in memory of its own: autograd may give one tensor to several. others: addresses of memory that
    somebody else will use again."""
    known, found = set(others), dict[int, torch.Tensor]()
    for number, gradient in gradients.items():
        place = gradient.untyped_storage().data_ptr()
        found[number] = gradient.clone() if place in known else gradient
        known.add(place)
    return found


@dataclass(slots=True)
class Graph:
    """Of one micro-batch in a partition, until backward: where gradients of what entered come, and where others begin."""

    arrivals: dict[int, Arrival]
    edges: dict[int, Any]
    """Gradient edges of what leaves, and of what entered and is taken behind the partition too."""

    @classmethod
    def of(cls, arrivals: dict[int, Arrival], roots: Iterable[tuple[int, torch.Tensor]]) -> Self:
        edge = torch.autograd.graph.get_gradient_edge
        return cls(arrivals, {number: edge(tensor) for number, tensor in roots if tensor.requires_grad})

    @property
    def gradients(self) -> Pack:
        """What came to what entered."""
        return {number: a.gradient for number, a in self.arrivals.items() if a.gradient is not None}

    def let_go(self) -> None:
        for arrival in self.arrivals.values():
            arrival.let_go()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a slot a tensor lies: `offset` in bytes."""

    offset: int
    look: Look

    def on(self, buffer: torch.Tensor) -> torch.Tensor:
        return self.look.at((int(buffer.storage_offset()) + self.offset) // self.look.dtype.itemsize, buffer)


@dataclass(frozen=True, slots=True)
class _Saved:
    """An activation. PyTorch does not look at its version where hooks save it."""

    tensor: torch.Tensor
    version: int

    def unchanged(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise ModelError(
                f"a tensor of shape {tuple(self.tensor.shape)} that is needed for gradients was changed by an in-place "
                "operation behind the one that saved it, which PyTorch does not allow. Let that one write into a copy."
            )
        return self.tensor


def packing(
    buffer: torch.Tensor, buffer_now: Callable[[], torch.Tensor | None], changing: Sequence[torch.Tensor],
    offload: GraphOffload | None = None,
) -> torch.autograd.graph.saved_tensors_hooks:  # fmt: skip
    """Inside, autograd saves a place instead of a view of `buffer`; it is looked up in `buffer_now()` when it is needed.

    Of what begins in one of the `changing` tensors it saves a copy. All else goes to `offload`, if there is one.
    """
    # Not `buffer` itself: the graph keeps what these functions refer to, and the slot is to hold another partition.
    storage, start, device = buffer.untyped_storage().data_ptr(), buffer.storage_offset(), buffer.device
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in changing]

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != storage:
            away = offload.pack(tensor) if offload is not None and tensor.device == device else None
            return away or _Saved(tensor, tensor._version)
        if any(first <= tensor.data_ptr() < end for first, end in ranges):
            return tensor.clone()
        offset = int(tensor.storage_offset()) * tensor.dtype.itemsize - int(start)
        return _Place(offset, Look.of(tensor))

    def unpack(packed: Any) -> torch.Tensor:
        if offload is not None and isinstance(packed, Offloaded):
            return offload.unpack(packed)
        now = buffer_now() if isinstance(packed, _Place) else None
        if isinstance(packed, _Saved):
            return packed.unchanged()
        tensor: torch.Tensor = packed if now is None else packed.on(now)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
