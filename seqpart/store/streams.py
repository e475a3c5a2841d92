"""A home's bytes from the first to the last, piece by piece: for homes that are cut and joined, never whole in memory.

Memory is copied by the calling thread alone: torch would start a team of threads for every piece.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from seqpart.device.pages import aligned, bytes_of, round_up
from seqpart.store.layout import Layout
from seqpart.store.tensor_file import TensorFiles, Version, Writing


class Source(Protocol):
    def fill(self, memory: memoryview) -> None:
        """Copy the next bytes into `memory`, as many as it has."""

    def close(self) -> None:
        """Behind the last byte. Raises CorruptFile unless all of them are what was put."""


class Sink(Protocol):
    def append(self, memory: memoryview) -> None:
        """The next bytes."""


class _Gaps:
    """Where tensors lie with gaps between them, and who reads or writes them knows of none: `pieces` divides what is moved at
    the gaps."""

    def __init__(self, layout: Layout) -> None:
        self._at, self._ahead = 0, list(layout.gaps)

    def pieces(self, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
        """(bytes to leave out, what comes behind them), to the end of `memory`."""
        while len(memory):
            gap = self._ahead.pop(0)[1] if self._ahead and self._ahead[0][0] == self._at else 0
            self._at += gap
            piece = memory[: self._ahead[0][0] - self._at] if self._ahead else memory
            memory = memory[len(piece) :]
            self._at += len(piece)
            yield gap, piece


class WithoutGaps:
    """The tensors of a home alone, out of all its bytes."""

    def __init__(self, source: Source, layout: Layout) -> None:
        self._source, self._gaps = source, _Gaps(layout)

    def fill(self, memory: memoryview) -> None:
        for gap, piece in self._gaps.pieces(memory):
            self._source.fill(memoryview(bytearray(gap)))
            self._source.fill(piece)

    def close(self) -> None:
        self._source.close()


class WithGaps:
    """The bytes of a home, zeros between its tensors, of which only these are given."""

    def __init__(self, sink: Sink, layout: Layout) -> None:
        self._sink, self._gaps = sink, _Gaps(layout)

    def append(self, memory: memoryview) -> None:
        for gap, piece in self._gaps.pieces(memory):
            self._sink.append(memoryview(bytes(gap)))
            self._sink.append(piece)


class FromHost:
    def __init__(self, home: torch.Tensor) -> None:
        self._home, self._at = bytes_of(home), 0

    def fill(self, memory: memoryview) -> None:
        memory[:] = self._home[self._at : self._at + len(memory)]
        self._at += len(memory)

    def close(self) -> None:
        self._home = self._home[:0]


class FromFile:
    def __init__(self, files: TensorFiles, version: Version, request: int) -> None:
        self._buffer = aligned(min(request, max(1, version.layout.nbytes)))
        self._bytes = bytes_of(self._buffer)
        self._pieces = files.pieces(version, request, lambda at, want: self._buffer[: round_up(want)])
        self._at = self._held = 0

    def fill(self, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            if self._at == self._held:
                self._at, (_, self._held) = 0, next(self._pieces)
            some = min(len(memory) - done, self._held - self._at)
            memory[done : done + some] = self._bytes[self._at : self._at + some]
            done, self._at = done + some, self._at + some

    def close(self) -> None:
        for _ in self._pieces:  # to the end, where the checksum is compared
            pass


class ToHost:
    def __init__(self, home: torch.Tensor) -> None:
        self._home, self._at = bytes_of(home), 0

    def append(self, memory: memoryview) -> None:
        self._home[self._at : self._at + len(memory)] = memory
        self._at += len(memory)


class ToFile:
    def __init__(self, writing: Writing, request: int) -> None:
        self._writing, self._bytes, self._filled = writing, bytes_of(aligned(request)), 0

    def append(self, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            some = min(len(memory) - done, len(self._bytes) - self._filled)
            self._bytes[self._filled : self._filled + some] = memory[done : done + some]
            done, self._filled = done + some, self._filled + some
            if self._filled == len(self._bytes):
                self._flush()

    def _flush(self) -> None:
        self._writing.append(self._bytes[: round_up(self._filled)], self._filled)
        self._filled = 0

    def finish(self) -> Version:
        if self._filled:
            self._flush()
        return self._writing.finish()
