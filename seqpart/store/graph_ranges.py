"""Places for offloaded graphs: ranges of bytes, one for each partition and micro-batch.

    DiskRanges     ranges of a file
    SharedRanges   ranges of host memory that is the device's own: graphs are used in place
    HostRanges     ranges of host memory, and two buffers on the device

        FORWARD 0.0 in buffer A   FORWARD 0.1 in buffer B   FORWARD 0.2 in A, after (1)      ...   BACKWARD 0.0 after (2)
                                  (1) A goes down           B goes down              (2) 0.0 comes up in A, after (1)

Two buffers take turns: one is gathered in or used, while the other goes down or comes up. So offloaded graphs take no memory of
the device beyond the buffers, however slow the link is, and no thread blocks: streams wait for events.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from seqpart.device.device import DOWN, UP, Device, Event
from seqpart.store.streams import BufferedFile

Key = tuple[int, int]
"""(partition, micro-batch)."""
GRAPH_BUFFERS = 2
"""Number of buffers: one is gathered in or used, while the other is written or read."""
Rooms = Mapping[int, Sequence[torch.Tensor]]
"""{partition: host memory of its graphs that wait at the same time}: of all micro-batches of an update, or of one."""


class Ranges:
    """Memory in which graphs are gathered and found again."""

    def begin(self, key: Key) -> torch.Tensor:
        """Returns flat bytes to gather the saved tensors of `key` in."""
        raise NotImplementedError

    def gather(self, whole: torch.Tensor, place: torch.Tensor) -> None:
        """Copies a storage to its place in these bytes, which the stream that computes owns."""
        place.copy_(whole)

    def finish(self, key: Key, used: int) -> None:
        """Ends gathering; the first `used` bytes are kept."""

    def open(self, key: Key) -> torch.Tensor:
        """Returns the bytes of `key` on the device, valid until `release`."""
        raise NotImplementedError

    def release(self, key: Key) -> None:
        """Frees the bytes of `key`, and begins to prefetch the graph that is needed next."""

    def fetch(self) -> None:
        """Begins to prefetch the graphs that BACKWARD needs first, while a later partition runs it."""

    def close(self) -> None:
        """Waits for all copies, so that the memory may go back to its owner."""


def _coming(waiting: Collection[Key]) -> list[Key]:
    """The graphs that are needed first: the first micro-batches of the last partition that is left."""
    return sorted(waiting, key=lambda key: (-key[0], key[1]))[:GRAPH_BUFFERS]


class DiskRanges(Ranges):
    """Ranges of a file, written during the next forward pass and read during the previous backward one, through two buffers."""

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


class SharedRanges(Ranges):
    """Ranges of host memory beside the limit, on a device that shares the processor's memory: nothing is copied."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def begin(self, key: Key) -> torch.Tensor:
        return _room(self._rooms, key)

    open = begin


def _room(rooms: Rooms, key: Key) -> torch.Tensor:
    p, m = key
    return rooms[p][m % len(rooms[p])]


@dataclass(slots=True, eq=False)
class _Buffer:
    flat: torch.Tensor
    key: Key | None = None
    """The graph that it holds whole."""
    filled: Event = None
    """Event after which that graph is there."""
    until: list[Event] = field(default_factory=list)
    """Events after which it may be filled again."""


class HostRanges(Ranges):
    """Ranges of pinned host memory, to and from which the streams of copies move graphs. See the figure above."""

    def __init__(self, rooms: Rooms, device: Device) -> None:
        self._rooms, self._device = rooms, device
        largest = max(room.nbytes for own in rooms.values() for room in own)
        self._buffers = [_Buffer(device.empty(largest)) for _ in range(GRAPH_BUFFERS)]
        """Buffers, the longest unused first."""
        self._used: dict[Key, int] = {}
        self._left: dict[Key, Event] = {}
        """Events after which a gathered graph is all in host memory."""

    def begin(self, key: Key) -> torch.Tensor:
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        for event in buffer.until:
            self._device.after(event)
        buffer.key, buffer.filled = key, None
        return buffer.flat[: _room(self._rooms, key).nbytes]

    def finish(self, key: Key, used: int) -> None:
        self._used[key] = used
        buffer, gathered = self._buffers[-1], self._device.mark()
        with self._device.copying(DOWN):
            self._device.after(gathered)  # and so after the update before, which has used the earlier bytes of its range
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
        """Begins to copy a graph into a buffer that holds none of the graphs needed next."""
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
        for buffer in self._buffers:
            for event in buffer.until:
                self._device.wait(event)
        self._buffers = []
