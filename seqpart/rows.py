"""One boundary's rows at home: a row is one sample's tensor, rows are kept in order, in chunks of whole pages.

A file of rows is a safetensors file with one tensor, `rows`, (n, row width); rows are padded to a stride that keeps
chunks on page boundaries. A checksum per chunk is kept while the run lives and compared at every read.
"""

from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path

import torch
import xxhash

from seqpart.arena import Arena
from seqpart.device import Device
from seqpart.direct import PAGE, DirectFile, aligned, bytes_of, round_up
from seqpart.errors import CorruptFile
from seqpart.layout import TensorSpec, encode_header

CHUNK = 1 << 20
"""About this many bytes are read at a time."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Shape and type of one row, and how rows lie in a chunk."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def stride(self) -> int:
        """Bytes from row to row: padded to 512 (large rows) or 64, so that few rows make whole pages."""
        return round_up(self.nbytes, 512 if self.nbytes >= PAGE else 64)

    @property
    def chunk_rows(self) -> int:
        whole = PAGE // gcd(self.stride, PAGE)
        return max(1, CHUNK // (self.stride * whole)) * whole

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_rows * self.stride

    def home_bytes(self, rows: int) -> int:
        return round_up(rows * self.stride)


class Rows:
    """Written once from the first row to the last, then read by chunks, any chunk at any time, by one thread."""

    def __init__(self, layout: RowLayout, count: int, path: Path, device: Device, arena: Arena | None) -> None:
        self.layout, self.count, self.path = layout, count, path
        self.bytes_read = self.bytes_written = 0
        self._arena = arena
        self._host = arena.take(layout.home_bytes(count)) if arena is not None else None
        self.tier = "disk" if self._host is None else device.host_tier
        self._checksums: list[int] = []
        self._file: DirectFile | None = None
        self._stage: torch.Tensor | None = None
        self._filled = self._done = 0
        self._header = b""
        if self._host is None:
            self._open()

    def _open(self) -> None:
        width = self.layout.stride // self.layout.dtype.itemsize
        spec = TensorSpec(name="rows", shape=(self.count, width), dtype=self.layout.dtype)
        shape = ",".join(map(str, self.layout.shape))
        self._header = encode_header([spec], {"format": "pt", "row shape": shape})
        self._file = DirectFile(self.path, write=True)
        page = aligned(len(self._header))
        bytes_of(page)[:] = self._header
        self._file.write_from(bytes_of(page), 0)

    @property
    def chunks(self) -> int:
        return -(-self.count // self.layout.chunk_rows)

    def rows_in(self, chunk: int) -> int:
        return min(self.layout.chunk_rows, self.count - chunk * self.layout.chunk_rows)

    def append(self, batch: torch.Tensor) -> None:
        """Add the rows of `batch`, (rows, *shape), from any device; cast to the layout's type."""
        rows = batch.detach().to(self.layout.dtype).reshape(len(batch), -1).cpu().contiguous().view(torch.uint8)
        held = self._done * self.layout.chunk_rows + self._filled
        assert held + len(rows) <= self.count, f"{self.path.name}: {held + len(rows)} rows came, {self.count} were expected"
        taken = 0
        while taken < len(rows):
            stage = self._stage_rows()
            room = self.rows_in(self._done) - self._filled
            some = rows[taken : taken + room]
            stage[self._filled : self._filled + len(some), : self.layout.nbytes].copy_(some)
            self._filled += len(some)
            taken += len(some)
            if self._filled == self.rows_in(self._done):
                self._flush(stage)

    def _stage_rows(self) -> torch.Tensor:
        """The chunk being filled, (chunk_rows, stride) bytes: in the arena itself, or a buffer to be written."""
        layout = self.layout
        if self._host is not None:
            start = self._done * layout.chunk_bytes
            return self._host[start : start + self.rows_in(self._done) * layout.stride].view(-1, layout.stride)
        if self._stage is None:
            self._stage = aligned(layout.chunk_bytes).zero_()
        return self._stage.view(-1, layout.stride)

    def _flush(self, stage: torch.Tensor) -> None:
        nbytes = self.rows_in(self._done) * self.layout.stride
        memory = bytes_of(stage.reshape(-1))
        self._checksums.append(xxhash.xxh3_64_intdigest(memory[:nbytes]))
        if self._file is not None:
            self._file.write_from(memory[: round_up(nbytes)], len(self._header) + self._done * self.layout.chunk_bytes)
            self.bytes_written += nbytes
        self._done, self._filled = self._done + 1, 0

    def finish(self) -> None:
        """The last row is in: cut the padding off and free the buffer."""
        assert self._done == self.chunks, f"{self.path.name}: {self._done} of {self.chunks} chunks were written"
        self._stage = None
        if self._file is not None:
            self._file.finish(len(self._header) + self.count * self.layout.stride)

    def read_chunk(self, chunk: int, into: torch.Tensor) -> None:
        """Copy chunk number `chunk` to the start of `into`, a page-aligned uint8 buffer of chunk_bytes."""
        nbytes, start = self.rows_in(chunk) * self.layout.stride, chunk * self.layout.chunk_bytes
        if self._host is not None:
            # Not tensor.copy_: in this thread it would start an OpenMP team of its own, with stacks that nobody planned.
            bytes_of(into)[:nbytes] = bytes_of(self._host)[start : start + nbytes]
        elif self._file is not None:
            memory = bytes_of(into[: round_up(nbytes)])
            if self._file.read_into(memory, len(self._header) + start) < nbytes:
                raise CorruptFile(f"{self.path} is shorter than it was written. It was not used.")
            self.bytes_read += nbytes
        if xxhash.xxh3_64_intdigest(bytes_of(into)[:nbytes]) != self._checksums[chunk]:
            raise CorruptFile(f"{self.path} is damaged in its rows from {chunk * self.layout.chunk_rows} on. It was not used.")

    def discard(self) -> None:
        if self._host is not None and self._arena is not None:
            self._arena.give(self._host)
            self._host = None
        if self._file is not None:
            self._file.__exit__()
            self._file = None
            self.path.unlink(missing_ok=True)
