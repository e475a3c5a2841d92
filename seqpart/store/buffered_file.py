"""Ranges of one file that wait for their turn: read and written by a thread of its own, through a few buffers."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, TypeVar

from seqpart.device.device import Device
from seqpart.device.pages import bytes_of, round_up
from seqpart.files import remove
from seqpart.store.direct import DirectFile
from seqpart.store.movers import movers

K = TypeVar("K")


class BufferedFile(Generic[K]):
    """A new file, and `count` buffers of `nbytes` that each hold the bytes of one key. name: of the thread.

    What a transfer raised is raised by the next `settle` or `claim` of its buffer.
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
        """The buffer that holds `key`."""
        return next((number for number, held in self._holds.items() if held == key), None)

    def claim(self, key: K) -> int:
        """A buffer for `key`: an empty one, or the longest unused, whose bytes are in the file."""
        number = next((number for number in self._recent if number not in self._holds), self._recent[0])
        self.settle(number)
        self._holds[number] = key
        self.touch(number)
        return number

    def touch(self, number: int) -> None:
        """It is in use now."""
        self._recent.remove(number)
        self._recent.append(number)

    def empty(self, number: int) -> None:
        """Nobody needs what it holds."""
        del self._holds[number]

    def write(self, number: int, nbytes: int, offset: int) -> None:
        """Begin to write its first `nbytes` to `offset`."""
        self._begin(self._file.write_from, number, nbytes, offset)

    def read(self, number: int, nbytes: int, offset: int) -> None:
        """Begin to read them from there, behind all that is being written."""
        self._begin(self._file.read_into, number, nbytes, offset)

    def _begin(self, move: Callable[[memoryview, int], object], number: int, nbytes: int, offset: int) -> None:
        self._work[number] = self._pool.submit(move, bytes_of(self.buffers[number][: round_up(nbytes)]), offset)

    def settle(self, number: int) -> None:
        """Its last transfer is over; raises what that raised."""
        work, self._work[number] = self._work[number], None
        if work is not None:
            work.result()

    def close(self) -> None:
        """The file is gone."""
        self._pool.shutdown()
        self._file.__exit__()
        remove(self._file.path)
        self.buffers, self._holds = [], {}
