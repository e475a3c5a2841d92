"""Where saved tensors of a graph wait between FORWARD and BACKWARD, when they are not to wait on the device.

Whole storages are copied as autograd saves parts of them, one behind the other, into a range of bytes that belongs to the
partition and micro-batch; in the backward pass the saved tensors are views of a copy of that range. So each byte is moved
once each way, however many nodes saved it.

The range is a part of a file. It is written behind the next forward pass and read behind the last backward one, through two
buffers.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from seqpart.costs.clock import GRAPH_BUFFERS
from seqpart.costs.partition import LINE, PartitionCost
from seqpart.files.direct import round_up
from seqpart.memory.device import Device
from seqpart.offload.buffered_file import BufferedFile

Key = tuple[int, int]
"""(partition, micro-batch)."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A saved tensor: where its storage begins in the range of `key`, and how it lies there."""

    key: Key
    offset: int
    first: int
    """Elements from the storage's beginning to the tensor's."""
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def on(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor in `flat`, which holds the range."""
        begins = (flat.storage_offset() + self.offset) // self.dtype.itemsize + self.first
        empty = torch.empty(0, dtype=self.dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), begins, self.shape, self.stride)


class GraphOffload:
    """Gathers saved tensors in `ranges` and finds them again."""

    def __init__(self, ranges: "DiskRanges") -> None:
        self._ranges = ranges
        self._key: Key | None = None
        self._flat, self._used = torch.empty(0, dtype=torch.uint8), 0
        self._known: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Where storages begin that were gathered for this key, by identity and version; they may be dead."""
        self._open: dict[Key, torch.Tensor] = {}

    def begin(self, key: Key) -> None:
        """From now on `pack` gathers for `key`."""
        self._key, self._flat, self._used = key, self._ranges.begin(key), 0
        self._known.clear()

    def finish(self) -> None:
        assert self._key is not None
        self._ranges.finish(self._key, self._used)
        self._key = None
        self._known.clear()

    def pack(self, tensor: torch.Tensor) -> Offloaded | None:
        """Its place, or None where there is no room for it: what a block saves may be more than was counted."""
        storage = tensor.untyped_storage()
        offset = self._place_of(storage, tensor._version)
        if self._key is None or offset is None:
            return None
        return Offloaded(self._key, offset, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)

    def _place_of(self, storage: torch.UntypedStorage, version: int) -> int | None:
        known = self._known.get((id(storage), version))
        if known is not None and known[0]() is storage:
            return known[1]
        offset, nbytes = self._used, storage.nbytes()
        if offset + nbytes > len(self._flat):
            return None
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))
        self._flat[offset : offset + nbytes].copy_(whole, non_blocking=True)
        self._used += round_up(nbytes, LINE)  # kernels round otherwise where memory lies otherwise
        self._known[id(storage), version] = weakref.ref(storage), offset
        return offset

    def unpack(self, saved: Offloaded) -> torch.Tensor:
        return saved.on(self._open[saved.key])

    def open(self, key: Key) -> int:
        """Bring what `key` gathered to the device. Returns the address of its memory."""
        flat = self._open[key] = self._ranges.open(key)
        return int(flat.untyped_storage().data_ptr())

    def release(self, key: Key) -> None:
        """Its graph is gone."""
        del self._open[key]
        self._ranges.release(key)

    def close(self) -> None:
        self._open.clear()
        self._ranges.close()


class DiskRanges:
    """Memory in which graphs are gathered and found again: ranges of a file, and buffers for those in use."""

    def __init__(self, path: Path, capacities: Mapping[int, int], micro_batches: int, device: Device) -> None:
        self._device, self._capacities = device, capacities
        self._starts, end = dict[int, int](), 0
        for p, capacity in capacities.items():
            self._starts[p], end = end, end + capacity * micro_batches
        self._file = BufferedFile[Key](path, max(capacities.values()), GRAPH_BUFFERS, "seqpart-graphs", device)
        self._used: dict[Key, int] = {}

    def begin(self, key: Key) -> torch.Tensor:
        """Flat bytes to gather the saved tensors of `key` in."""
        return self._file.buffers[self._file.claim(key)][: self._capacities[key[0]]]

    def finish(self, key: Key, used: int) -> None:
        """The first `used` bytes are to be kept."""
        self._used[key] = used
        self._device.wait(self._device.mark())
        self._file.write(self._holding(key), used, self._offset(key))

    def open(self, key: Key) -> torch.Tensor:
        """The bytes again, on the device, until `release`."""
        if self._file.number_of(key) is None:
            self._begin_read(key)
        number = self._holding(key)
        self._file.settle(number)
        return self._device.upload(self._file.buffers[number][: self._used[key]])

    def release(self, key: Key) -> None:
        """Begin to read the one that is needed next: the last partition that is left, its first micro-batch."""
        self._device.wait(self._device.mark())
        self._file.empty(self._holding(key))
        del self._used[key]
        following = sorted(self._used, key=lambda key: (-key[0], key[1]))[:GRAPH_BUFFERS]
        coming = next((key for key in following if self._file.number_of(key) is None), None)
        if coming is not None:
            self._begin_read(coming)

    def _begin_read(self, key: Key) -> None:
        self._file.read(self._file.claim(key), self._used[key], self._offset(key))

    def _holding(self, key: Key) -> int:
        number = self._file.number_of(key)
        assert number is not None
        return number

    def _offset(self, key: Key) -> int:
        return self._starts[key[0]] + key[1] * self._capacities[key[0]]

    def close(self) -> None:
        self._file.close()


def open_graphs(
    parts: Sequence[PartitionCost], offloads: Collection[int], micro_batches: int, path: Path, device: Device
) -> GraphOffload | None:
    """For the graphs of partitions `offloads` with so many micro-batches an update, in a new file `path`."""
    if not offloads:
        return None
    capacities = {p: round_up(parts[p].graph) for p in sorted(offloads)}
    return GraphOffload(DiskRanges(path, capacities, micro_batches, device))
