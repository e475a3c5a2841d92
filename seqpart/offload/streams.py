"""A home's bytes from the first to the last, piece by piece: for homes that are cut and joined, never whole in memory."""

from typing import Protocol

import torch

from seqpart.files.direct import aligned, bytes_of, round_up
from seqpart.offload.tensor_file import TensorFiles, Version, Writing


class Source(Protocol):
    def fill(self, flat: torch.Tensor) -> None:
        """Copy the next len(flat) bytes into `flat`, uint8."""

    def close(self) -> None:
        """Behind the last byte. Raises CorruptFile unless all of them are what was put."""


class Sink(Protocol):
    def append(self, flat: torch.Tensor) -> None:
        """The next len(flat) bytes, uint8."""


class FromHost:
    def __init__(self, home: torch.Tensor) -> None:
        self._home, self._at = home, 0

    def fill(self, flat: torch.Tensor) -> None:
        flat.copy_(self._home[self._at : self._at + len(flat)])
        self._at += len(flat)

    def close(self) -> None:
        self._home = self._home[:0]


class FromFile:
    def __init__(self, files: TensorFiles, version: Version, request: int) -> None:
        self._buffer = aligned(min(request, max(1, version.layout.nbytes)))
        self._pieces = files.pieces(version, request, lambda at, want: self._buffer[: round_up(want)])
        self._at = self._held = 0

    def fill(self, flat: torch.Tensor) -> None:
        done = 0
        while done < len(flat):
            if self._at == self._held:
                self._at, (_, self._held) = 0, next(self._pieces)
            some = min(len(flat) - done, self._held - self._at)
            flat[done : done + some].copy_(self._buffer[self._at : self._at + some])
            done, self._at = done + some, self._at + some

    def close(self) -> None:
        for _ in self._pieces:  # to the end, where the checksum is compared
            pass
        self._buffer = self._buffer[:0]


class ToHost:
    def __init__(self, home: torch.Tensor) -> None:
        self._home, self._at = home, 0

    def append(self, flat: torch.Tensor) -> None:
        self._home[self._at : self._at + len(flat)].copy_(flat)
        self._at += len(flat)


class ToFile:
    def __init__(self, writing: Writing, request: int) -> None:
        self._writing, self._buffer, self._filled = writing, aligned(request), 0

    def append(self, flat: torch.Tensor) -> None:
        done = 0
        while done < len(flat):
            some = min(len(flat) - done, len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + some].copy_(flat[done : done + some])
            done, self._filled = done + some, self._filled + some
            if self._filled == len(self._buffer):
                self._flush()

    def _flush(self) -> None:
        self._writing.append(bytes_of(self._buffer[: round_up(self._filled)]), self._filled)
        self._filled = 0

    def finish(self) -> Version:
        if self._filled:
            self._flush()
        return self._writing.finish()
