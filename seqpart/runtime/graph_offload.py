"""Offloads the saved tensors of a graph between FORWARD and BACKWARD.

When autograd saves a tensor, its whole storage is copied after those saved before, into a range of bytes that belongs to the
partition and micro-batch; in the backward pass the saved tensors are views of a copy of that range. So each byte is moved
once each way, however many nodes saved it. store/graph_ranges.py has the ranges.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from seqpart.device.device import Device
from seqpart.device.pages import round_up
from seqpart.errors import ModelError
from seqpart.model.packs import Pack
from seqpart.profile.partition import PartitionCost
from seqpart.store.graph_ranges import DiskRanges, HostRanges, Key, Ranges, SharedRanges
from seqpart.store.layout import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Packed:
    """Where a saved tensor lies in flat bytes that are found again by `key`, and how it views them."""

    key: Key | None
    """The graph that was offloaded with it; None: the bytes are the slot's."""
    offset: int
    """Bytes from the beginning of these bytes."""
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    conjugate: bool
    negative: bool
    """Lazy bits of complex tensors and their parts: the stored values are read so (`x.conj()` copies nothing)."""

    @classmethod
    def of(cls, tensor: torch.Tensor, key: Key | None, start: int) -> Self:
        """start: offset of the first byte of the tensor's storage."""
        offset = start + int(tensor.storage_offset()) * tensor.dtype.itemsize
        return cls(key, offset, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())

    def on(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the tensor as a view of `flat`, which holds the bytes."""
        first = (int(flat.storage_offset()) + self.offset) // self.dtype.itemsize
        found = torch.empty(0, dtype=self.dtype, device=flat.device)
        found = found.set_(flat.untyped_storage(), first, self.shape, self.stride)
        found = found.conj() if self.conjugate else found
        return torch._neg_view(found) if self.negative else found


class GraphOffload:
    """Gathers saved tensors in the ranges of their partitions, and looks them up again."""

    def __init__(self, ranges: Mapping[int, Ranges]) -> None:
        self._ranges, self._every = ranges, list(dict.fromkeys(ranges.values()))
        self._key: Key | None = None
        self._device = torch.device("cpu")
        self._flat, self._used = torch.empty(0, dtype=torch.uint8), 0
        self._known: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Byte offsets of the storages gathered for this key, by identity and version; the storages may be dead."""
        self._open: dict[Key, torch.Tensor] = {}

    def begin(self, key: Key) -> None:
        """Makes `pack` gather for `key` from now on."""
        self._key, self._flat, self._used = key, self._ranges[key[0]].begin(key), 0
        self._known.clear()

    def finish(self) -> None:
        assert self._key is not None
        self._ranges[self._key[0]].finish(self._key, self._used)
        self._key = None
        self._known.clear()

    def pack(self, tensor: torch.Tensor) -> Packed | None:
        """Copies a tensor and returns its place, or None if there is no room: a block may save more than was counted."""
        storage, self._device = tensor.untyped_storage(), tensor.device
        if self._key is None or (offset := self._place_of(storage, tensor._version)) is None:
            return None
        return Packed.of(tensor, self._key, offset)

    def _place_of(self, storage: torch.UntypedStorage, version: int) -> int | None:
        assert self._key is not None
        known = self._known.get((id(storage), version))
        if known is not None and known[0]() is storage:
            return known[1]
        offset, nbytes = self._used, storage.nbytes()
        if offset + nbytes > len(self._flat):
            return None
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))
        self._ranges[self._key[0]].gather(whole, self._flat[offset : offset + nbytes])
        self._used += round_up(nbytes, ALIGNMENT)  # kernels round differently at another alignment
        self._known[id(storage), version] = weakref.ref(storage), offset
        return offset

    def unpack(self, saved: Packed) -> torch.Tensor:
        assert saved.key is not None
        if saved.key == self._key:  # a block computes gradients in its own forward pass
            return saved.on(self._flat).to(self._device, copy=True)  # the next graph uses that memory
        return saved.on(self._open[saved.key])

    @contextmanager
    def on_device(self, key: Key | None) -> Iterator[frozenset[int]]:
        """A context in which what `key` gathered is on the device. Yields the addresses of its memory, which is reused later: a
        block may return one of them as a gradient. None: a BACKWARD that needs none of them, and prefetches the first."""
        if key is None:
            for ranges in self._every:
                ranges.fetch()
            yield frozenset()
        else:
            yield frozenset({self.open(key)})
            self.release(key)

    def open(self, key: Key) -> int:
        """Loads what `key` gathered to the device. Returns the address of its memory."""
        flat = self._open[key] = self._ranges[key[0]].open(key)
        return int(flat.untyped_storage().data_ptr())

    def release(self, key: Key) -> None:
        """Frees what `key` gathered, when its graph is gone."""
        del self._open[key]
        self._ranges[key[0]].release(key)

    def close(self) -> None:
        self._open.clear()
        for ranges in self._every:
            ranges.close()


def open_graphs(
    parts: Sequence[PartitionCost], offloads: Collection[int], micro_batches: int,
    rooms: Mapping[int, Sequence[torch.Tensor]], path: Path, device: Device,
) -> GraphOffload:  # fmt: skip
    """Opens the offload of the graphs of partitions `offloads`, with `micro_batches` per update: in their `rooms`, if they
    have some in host memory, else in a new file `path`."""
    ranges = dict[int, Ranges]()
    if rooms:
        ranges = dict.fromkeys(rooms, SharedRanges(rooms) if device.shares_memory else HostRanges(rooms, device))
    away = sorted(set(offloads).difference(rooms))
    if away:
        capacities = {p: round_up(parts[p].graph) for p in away}
        ranges |= dict.fromkeys(away, DiskRanges(path, capacities, micro_batches, device))
    return GraphOffload(ranges)


@dataclass(slots=True)
class Arrival:
    """The gradient that backward computes for a partition's input."""

    gradient: torch.Tensor | None = None
    leaf: torch.Tensor | None = None
    """The input itself, which autograd's graph refers to."""


class _Entry(torch.autograd.Function):
    """Takes the gradient unchanged: a leaf's `grad` may have another memory layout, and then kernels round differently."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        ctx.arrival = arrival
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.arrival.gradient = gradient
        return None, None


def entering(x: torch.Tensor, *, wants_gradient: bool) -> tuple[torch.Tensor, Arrival]:
    """Returns `x` as the input of a new graph, and the place of its gradient."""
    x, arrival = x.detach(), Arrival()
    if wants_gradient:
        arrival.leaf = x.requires_grad_()
        x = _Entry.apply(arrival.leaf, arrival)
    return x, arrival


def apart_from(others: Iterable[int], gradients: Mapping[int, torch.Tensor]) -> Pack:
    """Returns `gradients`, each in memory of its own: autograd may return one tensor several times. others: addresses of
    memory that will be reused elsewhere."""
    known, found = set(others), dict[int, torch.Tensor]()
    for number, gradient in gradients.items():
        place = gradient.untyped_storage().data_ptr()
        found[number] = gradient.clone() if place in known else gradient
        known.add(place)
    return found


@dataclass(slots=True)
class Graph:
    """One micro-batch's graph in a partition, until backward: where gradients of inputs arrive, and where others start."""

    arrivals: dict[int, Arrival]
    edges: dict[int, Any]
    """Gradient edges of the outputs, and of inputs that later partitions take too."""

    @classmethod
    def of(cls, arrivals: dict[int, Arrival], roots: Iterable[tuple[int, torch.Tensor]]) -> Self:
        edge = torch.autograd.graph.get_gradient_edge
        return cls(arrivals, {number: edge(tensor) for number, tensor in roots if tensor.requires_grad})

    @property
    def gradients(self) -> Pack:
        return {number: a.gradient for number, a in self.arrivals.items() if a.gradient is not None}

    def let_go(self) -> None:
        """Frees the inputs' memory; what the graph needs of it must be saved elsewhere."""
        for arrival in self.arrivals.values():
            if arrival.leaf is not None:
                arrival.leaf.data = arrival.leaf.data.new_empty(0)


@dataclass(frozen=True, slots=True)
class _Saved:
    """A saved activation and its version, which PyTorch does not check itself for tensors that hooks save."""

    tensor: torch.Tensor
    version: int

    def unchanged(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise ModelError(
                f"a tensor of shape {tuple(self.tensor.shape)} that is needed for gradients was changed by an in-place "
                "operation after the one that saved it, which PyTorch does not allow. Let that one write into a copy."
            )
        return self.tensor


def packing(
    buffer: torch.Tensor, buffer_now: Callable[[], torch.Tensor | None], changing: Sequence[torch.Tensor],
    offload: GraphOffload | None = None,
) -> torch.autograd.graph.saved_tensors_hooks:  # fmt: skip
    """A context in which autograd saves an offset instead of a view of `buffer`; backward looks it up in `buffer_now()`.

    It saves a copy of anything in one of the `changing` tensors. All else goes to `offload`, if there is one.
    """
    # Not `buffer` itself: the graph keeps what these functions refer to, and the slot is to hold another partition.
    storage, start, device = buffer.untyped_storage().data_ptr(), int(buffer.storage_offset()), buffer.device
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in changing]

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != storage:
            away = offload.pack(tensor) if offload is not None and tensor.device == device else None
            return away or _Saved(tensor.detach(), tensor._version)  # itself it would hold its own graph, in a cycle
        if any(first <= tensor.data_ptr() < end for first, end in ranges):
            return tensor.clone()
        return Packed.of(tensor, None, -start)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, _Saved):
            return packed.unchanged()
        if not isinstance(packed, Packed):
            tensor: torch.Tensor = packed
            return tensor
        if offload is not None and packed.key is not None:
            return offload.unpack(packed)
        now = buffer_now()
        assert now is not None, "backward runs without the partition"
        return packed.on(now)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
