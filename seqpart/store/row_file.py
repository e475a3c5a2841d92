"""Rows of one boundary at home: a row is one sample's tensor, rows are kept in order, in chunks of whole pages.

A file of rows is a safetensors file with one tensor, `rows`, (n, row width); rows are padded to a stride that keeps
chunks on page boundaries. A checksum per chunk is compared at every read; `persist` writes them into a file beside.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from typing import Any, Self

import torch
import xxhash

from seqpart.device.device import Device
from seqpart.device.pages import PAGE, aligned, bytes_of, round_up
from seqpart.errors import CorruptFile
from seqpart.files import PRIVATE, opened, remove
from seqpart.schema import Digest, as_type
from seqpart.store.atomic import write_text
from seqpart.store.direct import DirectFile, explained, sync
from seqpart.store.host_pool import HostPool, OwnMemory
from seqpart.store.layout import TensorSpec, encode_header
from seqpart.text import parsed

CHUNK = 1 << 20
"""Bytes that are read at a time, about."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Shape and type of one row, and how rows lie in a chunk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    becomes: torch.dtype | None = None
    """Type on the device, if it differs."""

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

    def converted_bytes(self, rows: int) -> int:
        """Bytes of `rows` rows in their type on the device; 0 if that is the same type."""
        becomes = self.becomes or self.dtype
        return 0 if becomes == self.dtype else rows * prod(self.shape) * becomes.itemsize


@dataclass(frozen=True, slots=True)
class PassingLayout(RowLayout):
    """Layout of rows that are read again in every pass, and not kept."""

    unit: int = 0
    """Rows that are read at once; 0: the rows of a micro-batch."""
    label_row: int = 0
    """Bytes of one row's labels."""
    work: int = 0
    """Bytes that reading takes beside the rows themselves."""
    order: int = 0
    """Bytes of the order of rows in an epoch."""
    processes: int = 0
    """Number of reading processes; 0: the run's own reads."""

    def home_bytes(self, rows: int) -> int:
        return 0

    def of_workers(self, micro_batch: int) -> int:
        """Bytes that all workers take while they read."""
        return self.processes * ((self.unit or micro_batch) * (self.nbytes + self.label_row) + self.work)

    def reading_bytes(self, micro_batch: int) -> int:
        """Bytes that reading takes in all processes."""
        own = round_up((self.unit or micro_batch) * self.nbytes) + (self.unit or micro_batch) * self.label_row
        work = 0 if self.processes else self.work
        return own + work + self.order + self.converted_bytes(micro_batch) + self.of_workers(micro_batch)


class Rows:
    """Written once from the first row to the last, then read by chunks, any chunk at any time, by one thread."""

    def __init__(
        self, layout: RowLayout, count: int, path: Path, device: Device, host_pool: HostPool | OwnMemory | None,
        checksums: list[int] | None = None,
    ) -> None:  # fmt: skip
        """Makes empty rows to append to; with `checksums` (one per chunk), opens rows that another process wrote at `path`."""
        self.layout, self.count, self.path = layout, count, path
        self.bytes_read = self.bytes_written = 0
        self._device, self._host_pool = device, host_pool
        self._host = host_pool.take(layout.home_bytes(count)) if host_pool is not None else None
        self.tier = "disk" if self._host is None else device.host_tier
        self._checksums = checksums or []
        self._file: DirectFile | None = None
        self._stage: torch.Tensor | None = None
        self._filled = self._done = 0
        self.finished = False
        self._described: dict[str, Any] = {}
        self._header = _header_of(layout, count)
        if checksums is not None:
            self._reopen()
        elif self._host is None:
            self._file = self._created()

    def _created(self) -> DirectFile:
        file = DirectFile(self.path, write=True)
        page = aligned(len(self._header))
        bytes_of(page)[:] = self._header
        file.write_from(bytes_of(page), 0)
        return file

    @property
    def files(self) -> tuple[str, str]:
        """Names of the rows' file and of their checksums' file, whether or not they are there."""
        return self.path.name, self.path.with_suffix(".sums.json").name

    @property
    def in_memory(self) -> torch.Tensor | None:
        """All rows, (count, row bytes) of uint8, if they lie in this process's own memory; otherwise None."""
        if self._host is None or not isinstance(self._host_pool, OwnMemory):
            return None
        rows = self._host[: self.count * self.layout.stride].view(self.count, self.layout.stride)
        return rows[:, : self.layout.nbytes]

    def leave_memory(self) -> None:
        """Moves finished rows from memory to the disk."""
        if self.in_memory is not None and self.finished:
            self.persist()
            self._host = self._host_pool = None
            self.tier = "disk"
            self._reopen()

    @property
    def chunks(self) -> int:
        return -(-self.count // self.layout.chunk_rows)

    def rows_in(self, chunk: int) -> int:
        return min(self.layout.chunk_rows, self.count - chunk * self.layout.chunk_rows)

    def append(self, batch: torch.Tensor) -> None:
        """Appends the rows of `batch`, (rows, *shape), from any device; cast to the layout's type."""
        rows = batch.detach().to(self.layout.dtype).reshape(len(batch), -1)
        rows = self._device.download(rows).contiguous().view(torch.uint8)
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
        """The chunk being filled, (chunk_rows, stride) bytes: in place in the host pool, or a buffer to be written."""
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
        """Ends writing after the last row: cuts the padding off and frees the buffer."""
        assert self._done == self.chunks, f"{self.path.name}: {self._done} of {self.chunks} chunks were written"
        self._stage = None
        if self._file is not None:
            self._file.finish(self._size)
        self.finished = True

    @property
    def _size(self) -> int:
        return len(self._header) + self.count * self.layout.stride

    def read_chunk(self, chunk: int, into: torch.Tensor) -> None:
        """Copies chunk number `chunk` to the start of `into`, a page-aligned uint8 buffer of chunk_bytes."""
        nbytes, start = self.rows_in(chunk) * self.layout.stride, chunk * self.layout.chunk_bytes
        if self._host is None:
            self._read(chunk, into)
            self.bytes_read += nbytes
        else:
            # Not tensor.copy_: in this thread it would start an OpenMP team of its own, with stacks that nobody planned.
            bytes_of(into)[:nbytes] = bytes_of(self._host)[start : start + nbytes]
            self._compare(chunk, into)

    def _read(self, chunk: int, into: torch.Tensor) -> None:
        assert self._file is not None, f"{self.path.name} is closed"
        nbytes = self.rows_in(chunk) * self.layout.stride
        offset = len(self._header) + chunk * self.layout.chunk_bytes
        if self._file.read_into(bytes_of(into[: round_up(nbytes)]), offset) < nbytes:
            raise CorruptFile(f"{self.path} is shorter than it was written. It was not used.", self.path)
        self._compare(chunk, into)

    def _compare(self, chunk: int, memory: torch.Tensor) -> None:
        nbytes = self.rows_in(chunk) * self.layout.stride
        if xxhash.xxh3_64_intdigest(bytes_of(memory)[:nbytes]) != self._checksums[chunk]:
            first = chunk * self.layout.chunk_rows
            raise CorruptFile(f"{self.path} is damaged in its rows from {first} on. It was not used.", self.path)

    def persist(self) -> dict[str, Any]:
        """Writes finished rows to the disk, once; returns a description with which another process can `adopt` them."""
        assert self.finished, f"{self.path.name}: rows that are not all written cannot be persisted"
        if not self._described:
            if self._host is not None:
                self._write_out(self._host)
            else:
                sync(self.path)
            file, sums = self.files
            text = json.dumps([f"{checksum:016x}" for checksum in self._checksums])
            write_text(self.path.with_name(sums), text, PRIVATE)
            self._described = {
                "file": file, "sums": sums, "digest": xxhash.xxh3_64_hexdigest(text.encode()), "count": self.count,
                "shape": list(self.layout.shape), "dtype": str(self.layout.dtype).removeprefix("torch."),
            }  # fmt: skip
        return self._described

    def _write_out(self, host: torch.Tensor) -> None:
        try:
            with self._created() as file:
                file.write_from(bytes_of(host)[: self.layout.home_bytes(self.count)], len(self._header))
                file.finish(self._size, durable=True)
        except BaseException:
            remove(self.path)
            raise

    @classmethod
    def adopt(cls, described: Mapping[str, Any], folder: Path, device: Device, host_pool: HostPool | OwnMemory | None) -> Self:
        """Opens rows that another process persisted in `folder`; in host memory again if there is room.

        Raises CorruptFile, naming a file that is missing, or damaged in its checksums, header or length; on the disk
        the rows themselves are read by `verify`.
        """
        sums, path = folder / described["sums"], folder / described["file"]
        layout = RowLayout(tuple(described["shape"]), getattr(torch, described["dtype"]))
        if not path.is_file():
            raise CorruptFile(f"{path} is missing.", path)
        size, saved = path.stat().st_size, len(_header_of(layout, described["count"])) + described["count"] * layout.stride
        if size != saved:  # before memory is taken for it
            raise CorruptFile(f"{path} has {size} bytes and was saved with {saved}. It was not used.", path)
        text = _bytes_of_file(sums)
        if xxhash.xxh3_64_hexdigest(text) != described["digest"]:
            raise CorruptFile(f"{sums} is {'damaged' if text else 'missing or empty'}. Its rows were not used.", sums)
        try:
            checksums = [int(checksum, 16) for checksum in as_type(list[Digest], parsed(text))]
        except ValueError as error:
            raise CorruptFile(f"{sums} holds no checksums ({error}). Its rows were not used.", sums) from None
        rows = cls(layout, described["count"], path, device, host_pool, checksums)
        rows._described = dict(described)
        return rows

    def _reopen(self) -> None:
        if len(self._checksums) != self.chunks:
            raise CorruptFile(f"{self.path} has {self.chunks} chunks and {len(self._checksums)} checksums.", self.path)
        self._file, head = DirectFile(self.path), aligned(len(self._header))
        self._done, self.finished = self.chunks, True
        self._file.read_into(bytes_of(head), 0)
        if bytes(bytes_of(head)) != self._header:
            text = f"{self.path} is damaged, or not the file that was saved: its header differs. It was not used."
            raise CorruptFile(text, self.path)
        if self._host is not None:
            for chunk in range(self.chunks):
                self._read(chunk, self._host[chunk * self.layout.chunk_bytes :])
            self._file.__exit__()
            self._file = None

    def verify(self) -> None:
        """Reads every row on the disk once. Raises CorruptFile, naming the file, unless they are what was written."""
        if self._file is not None:
            buffer = aligned(self.layout.chunk_bytes)
            for chunk in range(self.chunks):
                self._read(chunk, buffer)

    def close(self) -> None:
        """Releases memory and file handle; the files stay."""
        if self._host is not None and self._host_pool is not None:
            self._host_pool.give(self._host)
            self._host = None
        if self._file is not None:
            self._file.__exit__()
            self._file = None

    def discard(self) -> None:
        self.close()
        for name in self.files:
            remove(self.path.with_name(name))


def _bytes_of_file(path: Path) -> bytes:
    """Reads a file; empty if it is missing. Raises StoreError, naming it, if it is no plain file."""
    try:
        with open(opened(path), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise explained(error, path) from None


def _header_of(layout: RowLayout, count: int) -> bytes:
    spec = TensorSpec(name="rows", shape=(count, layout.stride // layout.dtype.itemsize), dtype=layout.dtype)
    return encode_header([spec], {"format": "pt", "row shape": ",".join(map(str, layout.shape))})
