"""Where graphs wait that are gathered outside of the device: ranges of bytes, one for each partition and micro-batch.

    DiskRanges     of a file
    SharedRanges   of host memory that is the device's own: what is gathered is used where it lies
    HostRanges     of host memory, and two buffers on the device

        FORWARD 0.0 in buffer A   FORWARD 0.1 in buffer B   FORWARD 0.2 in A, behind (1)     ...   BACKWARD 0.0 behind (2)
                                  (1) A goes down           B goes down              (2) 0.0 comes up in A, behind (1)

Of two buffers each has its turn: one is gathered in or used, while the other one goes down or comes up. So what waits takes
no memory of the device but theirs, however far the link is behind the computation, and nobody blocks: streams wait for events.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from seqpart.device.device import DOWN, UP, Device, Event
from seqpart.store.streams import BufferedFile

Key = tuple[int, int]
"""(partition, micro-batch)."""
GRAPH_BUFFERS = 2
"""One is gathered in or used, while the other is written or read."""
Rooms = Mapping[int, Sequence[torch.Tensor]]
"""By partition, host memory of graphs that wait at the same time: of all micro-batches of an update, or of one."""


class Ranges(Protocol):
    """Memory in which graphs are gathered and found again."""

    def begin(self, key: Key) -> torch.Tensor:
        """Flat bytes to gather the saved tensors of `key` in."""

    def gather(self, whole: torch.Tensor, place: torch.Tensor) -> None:
        """Copy a storage to its place in them."""

    def finish(self, key: Key, used: int) -> None:
        """The first `used` bytes are to be kept."""

    def open(self, key: Key) -> torch.Tensor:
        """The bytes again, on the device, until `release`."""

    def release(self, key: Key) -> None:
        """Nobody needs them; begin to bring what is needed next."""

    def fetch(self) -> None:
        """Begin to bring what BACKWARD needs first: a partition behind all of these runs it now."""

    def close(self) -> None: ...


def _coming(waiting: Collection[Key]) -> list[Key]:
    """Those that are needed first: of the last partition that is left, its first micro-batches."""
    return sorted(waiting, key=lambda key: (-key[0], key[1]))[:GRAPH_BUFFERS]


class DiskRanges:
    """Ranges of a file, written behind the next forward pass and read behind the last backward one, through two buffers."""

    def __init__(self, path: Path, capacities: Mapping[int, int], micro_batches: int, device: Device) -> None:
        self._device, self._capacities = device, capacities
        self._starts, end = dict[int, int](), 0
        for p, capacity in capacities.items():
            self._starts[p], end = end, end + capacity * micro_batches
        self._file = BufferedFile[Key](path, max(capacities.values()), GRAPH_BUFFERS, "seqpart-graphs", device)
        self._used: dict[Key, int] = {}

    def begin(self, key: Key) -> torch.Tensor:
        return self._file.buffers[self._file.claim(key)][: self._capacities[key[0]]]

    def gather(self, whole: torch.Tensor, place: torch.Tensor) -> None:
        self._device.copy(whole, place)

    def finish(self, key: Key, used: int) -> None:
        self._used[key] = used
        self._device.wait(self._device.mark())
        self._file.write(self._holding(key), used, self._offset(key))

    def open(self, key: Key) -> torch.Tensor:
        if self._file.number_of(key) is None:
            self._begin_read(key)
        number = self._holding(key)
        self._file.settle(number)
        return self._device.upload(self._file.buffers[number][: self._used[key]])

    def release(self, key: Key) -> None:
        self._device.wait(self._device.mark())
        self._file.empty(self._holding(key))
        del self._used[key]
        self.fetch()

    def fetch(self) -> None:
        coming = next((key for key in _coming(self._used) if self._file.number_of(key) is None), None)
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


class SharedRanges:
    """Host memory beside the limit, on a device that shares the processor's: nothing comes or goes."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def begin(self, key: Key) -> torch.Tensor:
        return _room(self._rooms, key)

    def gather(self, whole: torch.Tensor, place: torch.Tensor) -> None:
        place.copy_(whole)

    def finish(self, key: Key, used: int) -> None: ...

    def open(self, key: Key) -> torch.Tensor:
        return _room(self._rooms, key)

    def release(self, key: Key) -> None: ...

    def fetch(self) -> None: ...

    def close(self) -> None: ...


def _room(rooms: Rooms, key: Key) -> torch.Tensor:
    p, m = key
    return rooms[p][m % len(rooms[p])]


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory of the device."""

    flat: torch.Tensor
    key: Key | None = None
    """Whose graph is in it, whole."""
    filled: Event = None
    """Behind it that graph is there."""
    until: list[Event] = field(default_factory=list)
    """Behind them it may be filled again."""


class HostRanges:
    """Host memory of the device's, to which the streams of copies go and from which they come. See the figure above."""

    def __init__(self, rooms: Rooms, device: Device) -> None:
        self._rooms, self._device = rooms, device
        largest = max(room.nbytes for own in rooms.values() for room in own)
        self._buffers = [_Buffer(device.empty(largest)) for _ in range(GRAPH_BUFFERS)]
        """The longest unused first."""
        self._used: dict[Key, int] = {}
        self._left: dict[Key, Event] = {}
        """When what was gathered is all in host memory."""

    def begin(self, key: Key) -> torch.Tensor:
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        for event in buffer.until:
            self._device.after(event)
        buffer.key, buffer.filled = key, None
        return buffer.flat[: _room(self._rooms, key).nbytes]

    def gather(self, whole: torch.Tensor, place: torch.Tensor) -> None:
        place.copy_(whole)  # on the stream that computes, which owns both

    def finish(self, key: Key, used: int) -> None:
        self._used[key] = used
        buffer, gathered = self._buffers[-1], self._device.mark()
        with self._device.copying(DOWN):
            self._device.after(gathered)  # and so behind the update before, which has used what is in its range
            self._device.copy(buffer.flat[:used], _room(self._rooms, key)[:used])
            self._left[key] = self._device.mark()
        buffer.until = [self._left[key]]

    def open(self, key: Key) -> torch.Tensor:
        buffer = self._holding(key) or self._bring(key)
        self._device.after(buffer.filled)
        return buffer.flat

    def release(self, key: Key) -> None:
        buffer = self._holding(key)
        assert buffer is not None
        buffer.key = None
        buffer.until.append(self._device.mark())
        del self._used[key]
        self.fetch()

    def fetch(self) -> None:
        for key in _coming(self._used):
            if self._holding(key) is None:
                self._bring(key)

    def _bring(self, key: Key) -> _Buffer:
        """Into a buffer that none of those that come is in."""
        coming, used = {key, *_coming(self._used)}, self._used[key]
        buffer = next((buffer for buffer in self._buffers if buffer.key not in coming), self._buffers[0])
        with self._device.copying(UP):
            for event in (*buffer.until, self._left[key]):
                self._device.after(event)
            self._device.copy(_room(self._rooms, key)[:used], buffer.flat[:used])
            buffer.filled = self._device.mark()
        buffer.key, buffer.until = key, [buffer.filled]
        return buffer

    def _holding(self, key: Key) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.key == key), None)

    def close(self) -> None:
        """Copies are over, and the memory may go back to its owner."""
        for buffer in self._buffers:
            for event in buffer.until:
                self._device.wait(event)
        self._buffers = []


def host_ranges(rooms: Rooms, device: Device) -> SharedRanges | HostRanges:
    return SharedRanges(rooms) if device.shares_memory else HostRanges(rooms, device)
