"""Where saved tensors of a graph wait between FORWARD and BACKWARD, when they are not to wait on the device.

Whole storages are copied as autograd saves parts of them, one behind the other, into a range of bytes that belongs to the
partition and micro-batch; in the backward pass the saved tensors are views of a copy of that range. So each byte is moved
once each way, however many nodes saved it.

The range is a part of a file. It is written behind the next forward pass and read behind the last backward one, through two
buffers.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from seqpart.costs.clock import GRAPH_BUFFERS
from seqpart.costs.partition import LINE, PartitionCost
from seqpart.files.direct import DirectFile, aligned, bytes_of, round_up
from seqpart.files.owned import remove
from seqpart.memory.device import Device

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
    """Memory in which graphs are gathered and found again: of one file, written and read by a thread of its own."""

    def __init__(self, path: Path, capacities: Mapping[int, int], micro_batches: int, device: Device) -> None:
        self._device, self._file = device, DirectFile(path, write=True)
        self._starts, end = dict[int, int](), 0
        self._capacities = capacities
        for p, capacity in capacities.items():
            self._starts[p], end = end, end + capacity * micro_batches
        self._buffers = [aligned(max(self._capacities.values())) for _ in range(GRAPH_BUFFERS)]
        self._holds: list[Key | None] = [None] * GRAPH_BUFFERS
        self._recent = list(range(GRAPH_BUFFERS))
        """Buffers, the longest unused first."""
        self._work: list[Future[Any] | None] = [None] * GRAPH_BUFFERS
        self._used: dict[Key, int] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="seqpart-graphs")
        self._pool.submit(int).result()

    def begin(self, key: Key) -> torch.Tensor:
        """Flat bytes to gather the saved tensors of `key` in."""
        number = self._claim(key)
        return self._buffers[number][: self._capacities[key[0]]]

    def finish(self, key: Key, used: int) -> None:
        """The first `used` bytes are to be kept."""
        self._used[key] = used
        self._device.wait(self._device.mark())
        self._move(self._holds.index(key), key, self._file.write_from)

    def open(self, key: Key) -> torch.Tensor:
        """The bytes again, on the device, until `release`."""
        if key not in self._holds:
            self._move(self._claim(key), key, self._file.read_into)
        number = self._holds.index(key)
        self._settle(number)
        return self._device.upload(self._buffers[number][: self._used[key]])

    def release(self, key: Key) -> None:
        """Begin to read the one that is needed next: the last partition that is left, its first micro-batch."""
        self._device.wait(self._device.mark())
        self._holds[self._holds.index(key)] = None
        del self._used[key]
        following = sorted(self._used, key=lambda key: (-key[0], key[1]))[:GRAPH_BUFFERS]
        coming = next((key for key in following if key not in self._holds), None)
        if coming is not None:
            self._move(self._claim(coming), coming, self._file.read_into)

    def _claim(self, key: Key) -> int:
        """A buffer: an empty one, or the longest unused, whose bytes are in the file."""
        number = next((number for number in self._recent if self._holds[number] is None), self._recent[0])
        self._recent.remove(number)
        self._recent.append(number)
        self._settle(number)
        self._holds[number] = key
        return number

    def _move(self, number: int, key: Key, move: Any) -> None:
        memory = bytes_of(self._buffers[number][: round_up(self._used[key])])
        self._work[number] = self._pool.submit(move, memory, self._starts[key[0]] + key[1] * self._capacities[key[0]])

    def _settle(self, number: int) -> None:
        work, self._work[number] = self._work[number], None
        if work is not None:
            work.result()

    def close(self) -> None:
        self._pool.shutdown()
        self._file.__exit__()
        remove(self._file.path)
        self._buffers = []


def open_graphs(
    parts: Sequence[PartitionCost], offloads: Collection[int], micro_batches: int, path: Path, device: Device
) -> GraphOffload | None:
    """For the graphs of partitions `offloads` with so many micro-batches an update, in a new file `path`."""
    if not offloads:
        return None
    capacities = {p: round_up(parts[p].graph) for p in sorted(offloads)}
    return GraphOffload(DiskRanges(path, capacities, micro_batches, device))
