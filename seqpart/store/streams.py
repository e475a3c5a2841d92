"""Reads and writes a home's bytes in order, piece by piece: for homes that are split and merged, never whole in memory.

Memory is copied by the calling thread alone: torch would start a team of threads for every piece.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, TypeVar

from seqpart.device.device import Device
from seqpart.device.pages import aligned, bytes_of, round_up
from seqpart.files import remove
from seqpart.store.direct import DirectFile
from seqpart.store.layout import Layout
from seqpart.store.movers import movers


class _Gaps:
    """The gaps between the tensors of a layout, for callers that read or write the tensors without them: `pieces` divides their
    memory at the gaps."""

    def __init__(self, layout: Layout) -> None:
        self._at, self._ahead = 0, list(layout.gaps)

    def pieces(self, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yields (bytes of gap to skip, piece of `memory` after it), to the end of `memory`."""
        while len(memory):
            gap = self._ahead.pop(0)[1] if self._ahead and self._ahead[0][0] == self._at else 0
            self._at += gap
            piece = memory[: self._ahead[0][0] - self._at] if self._ahead else memory
            memory = memory[len(piece) :]
            self._at += len(piece)
            yield gap, piece


class Source:
    """Reads a home's tensors in order, without the gaps between them. pieces: all bytes of the home, some at a time."""

    def __init__(self, pieces: Iterable[memoryview], layout: Layout) -> None:
        self._pieces, self._gaps = iter(pieces), _Gaps(layout)
        self._held = memoryview(b"")

    def fill(self, memory: memoryview) -> None:
        """Copies the next bytes into `memory`, until it is full."""
        for gap, piece in self._gaps.pieces(memory):
            self._fill(memoryview(bytearray(gap)))
            self._fill(piece)

    def _fill(self, memory: memoryview) -> None:
        while len(memory):
            if not len(self._held):
                self._held = next(self._pieces)
            some = min(len(memory), len(self._held))
            memory[:some] = self._held[:some]
            memory, self._held = memory[some:], self._held[some:]

    def close(self) -> None:
        """Reads to the end, where a checksum is compared. Raises CorruptFile unless all bytes are what was put."""
        for _ in self._pieces:
            pass
        self._held = memoryview(b"")


class Sink:
    """Is given a home's tensors in order, and writes zeros into the gaps between them. write: appends bytes to the home."""

    def __init__(self, write: Callable[[memoryview], object], layout: Layout) -> None:
        self._write, self._gaps = write, _Gaps(layout)

    def append(self, memory: memoryview) -> None:
        for gap, piece in self._gaps.pieces(memory):
            self._write(memoryview(bytes(gap)))
            self._write(piece)


def in_order(home: memoryview) -> Callable[[memoryview], None]:
    """Returns a function that appends bytes to `home`."""
    at = 0

    def append(memory: memoryview) -> None:
        nonlocal at
        home[at : at + len(memory)] = memory
        at += len(memory)

    return append


class Gathering:
    """Gathers ragged pieces into requests for `write`, a function of (whole pages, bytes of them that count)."""

    def __init__(self, write: Callable[[memoryview, int], object], request: int) -> None:
        self._write, self._bytes, self._filled = write, bytes_of(aligned(request)), 0

    def append(self, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            some = min(len(memory) - done, len(self._bytes) - self._filled)
            self._bytes[self._filled : self._filled + some] = memory[done : done + some]
            done, self._filled = done + some, self._filled + some
            if self._filled == len(self._bytes):
                self.flush()

    def flush(self) -> None:
        """Writes the last pieces."""
        if self._filled:
            self._write(self._bytes[: round_up(self._filled)], self._filled)
        self._filled = 0


K = TypeVar("K")


class BufferedFile(Generic[K]):
    """A new file, and `count` buffers of `nbytes` that each hold the bytes of one key. name: name of the I/O thread.

    An error of a transfer is raised by the next `settle` or `claim` of its buffer.
    """

    def __init__(self, path: Path, nbytes: int, count: int, name: str, device: Device) -> None:
        self._file = DirectFile(path, write=True)
        self.buffers = [device.host(nbytes) for _ in range(count)]
        self._holds: dict[int, K] = {}
        self._work: list[Future[object] | None] = [None] * count
        self._recent = list(range(count))
        """Buffers, the longest unused first."""
        self._pool = movers(1, name)

    def number_of(self, key: K) -> int | None:
        return next((number for number, held in self._holds.items() if held == key), None)

    def claim(self, key: K) -> int:
        """Returns the number of a buffer for `key`: an empty one, or the longest unused, whose bytes are in the file."""
        number = next((number for number in self._recent if number not in self._holds), self._recent[0])
        self.settle(number)
        self._holds[number] = key
        self.touch(number)
        return number

    def touch(self, number: int) -> None:
        """Marks a buffer as most recently used."""
        self._recent.remove(number)
        self._recent.append(number)

    def empty(self, number: int) -> None:
        del self._holds[number]

    def write(self, number: int, nbytes: int, offset: int) -> None:
        """Begins to write the first `nbytes` of a buffer to `offset`."""
        self._begin(self._file.write_from, number, nbytes, offset)

    def read(self, number: int, nbytes: int, offset: int) -> None:
        """Begins to read `nbytes` from `offset` into a buffer, after all earlier transfers."""
        self._begin(self._file.read_into, number, nbytes, offset)

    def _begin(self, move: Callable[[memoryview, int], object], number: int, nbytes: int, offset: int) -> None:
        self._work[number] = self._pool.submit(move, bytes_of(self.buffers[number][: round_up(nbytes)]), offset)

    def settle(self, number: int) -> None:
        """Waits for the last transfer of a buffer; raises its error."""
        work, self._work[number] = self._work[number], None
        if work is not None:
            work.result()

    def close(self) -> None:
        """Waits for all transfers, and removes the file."""
        self._pool.shutdown()
        self._file.__exit__()
        remove(self._file.path)
        self.buffers, self._holds = [], {}
