"""Versions of a home as safetensors files: written whole, read back with a checksum.

The checksum of the data is in the header, so the header's own digest vouches for the whole file: that one number is all that a
checkpoint has to store of it.

Checksums protect data that stay on a disk. A home that the next update writes anew is read back within seconds, and its
checksum would cost as much processor time as the rest of the transfer: it is written without one, and gets it (`add_checksum`)
when a checkpoint will name it.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import xxhash

from seqpart.device.device import Device, Event
from seqpart.device.pages import PAGE, aligned, bytes_of, round_up
from seqpart.errors import CorruptFile
from seqpart.files import remove
from seqpart.schema import Digest, as_type
from seqpart.store.direct import REQUEST, DirectFile
from seqpart.store.layout import Layout, TensorSpec, decode_header, encode_header, header_size

CHECK = 1 << 19
"""Bytes read at a time for checks, which are not urgent and must not take a training buffer's memory."""


@dataclass(slots=True)
class Version:
    path: Path
    layout: Layout
    header: int
    """Bytes before the data."""
    checksum: int
    """Checksum of the data; 0 while it has none."""
    digest: int
    """Digest of the header."""
    checksummed: bool = True
    """True if it has a checksum, which every read compares."""
    durable: bool = False
    """True if it would survive a loss of power."""


class Writing:
    """A version while it is written, from its first byte to its last."""

    def __init__(
        self, path: Path, layout: Layout, file: DirectFile, page_of: Callable[[bytes], memoryview], *, checksummed: bool
    ) -> None:
        self._path, self._layout, self._file, self._page_of, self._checksummed = path, layout, file, page_of, checksummed
        # The checksum goes into the header, so the header's size must not depend on it: its digits are always as many.
        self._header, self._digest, self._at = _header_without_checksum(layout.specs), xxhash.xxh3_64(), 0

    def append(self, memory: memoryview, nbytes: int) -> None:
        """Appends `nbytes`, in `memory` of whole pages: a multiple of a page, except for the last."""
        if self._checksummed:
            self._digest.update(memory[:nbytes])
        self._file.write_from(memory, len(self._header) + self._at)
        self._at += nbytes

    def finish(self) -> Version:
        assert self._at == self._layout.nbytes, f"{self._path} is not whole"
        checksum = self._digest.intdigest() if self._checksummed else 0
        head = encode_header(self._layout.specs, _metadata(checksum)) if self._checksummed else self._header
        self._file.write_from(self._page_of(head), 0)
        self._file.finish(len(self._header) + self._at)
        digest = xxhash.xxh3_64_intdigest(head)
        return Version(self._path, self._layout, len(self._header), checksum, digest, self._checksummed)


class _Staging(threading.local):
    """Two buffers of a thread in host memory, the last used first: a header's pages on the CPU, a request's size elsewhere."""

    def __init__(self) -> None:
        self.buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self.busy: list[Event] = [None, None]
        """Events after which copies out of each buffer are over."""


class TensorFiles:
    """Moves whole homes in the calling thread. Flat buffers are uint8, of at least `layout.padded_nbytes` bytes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._staging = _Staging()

    def write(self, path: Path, layout: Layout, flat: torch.Tensor, *, checksummed: bool = True) -> Version:
        """Writes a version to `path`, over the disk blocks of an existing file. A failure leaves no file."""
        with self.writing(path, layout, checksummed=checksummed) as writing:
            for at in range(0, layout.nbytes, REQUEST):
                want = min(REQUEST, layout.nbytes - at)
                writing.append(self._readable(flat, at, want), want)
            return writing.finish()

    @contextmanager
    def writing(self, path: Path, layout: Layout, *, checksummed: bool = True) -> Iterator[Writing]:
        """A context to write a version to `path` piece by piece; `finish` completes it. A failure leaves no file."""
        try:
            with DirectFile(path, write=True, keep=True) as file:
                yield Writing(path, layout, file, self._page_of, checksummed=checksummed)
        except BaseException:
            remove(path)
            raise

    def add_checksum(self, version: Version) -> None:
        """Reads the data once more, and writes their checksum into the header."""
        if version.checksummed:
            return
        digest = xxhash.xxh3_64()
        for piece in self.chunks(version, CHECK):
            digest.update(piece)
        head = encode_header(version.layout.specs, _metadata(digest.intdigest()))
        with DirectFile(version.path, patch=True) as file:
            file.write_from(self._page_of(head), 0)
            file.finish(version.header + version.layout.nbytes)
        version.checksum, version.digest, version.checksummed = digest.intdigest(), xxhash.xxh3_64_intdigest(head), True

    def read(self, version: Version, flat: torch.Tensor) -> None:
        """Copies the data into `flat`. Raises CorruptFile, naming the file, unless they are what was written, by header and
        length, and by checksum if there is one."""
        if self._device.is_host(flat):
            for _ in self.pieces(version, REQUEST, lambda at, want: flat[at : at + round_up(want)]):
                pass
            return
        for at, want in self.pieces(version, REQUEST, lambda at, want: self._stage(want)[: round_up(want)]):
            self._device.copy(self._staging.buffers[0][:want], flat[at : at + want])
            self._staging.busy[0] = self._device.mark()

    def check(self, version: Version) -> None:
        """Reads the file once from end to end; raises CorruptFile, naming it, unless it is what was written."""
        for _ in self.chunks(version, CHECK):
            pass

    def chunks(self, version: Version, request: int) -> Iterator[memoryview]:
        """Yields the data, `request` bytes at a time, in memory that is used again; compares the checksum at the end."""
        buffer = aligned(min(request, version.layout.padded_nbytes))
        for _, want in self.pieces(version, request, lambda at, want: buffer[: round_up(want)]):
            yield bytes_of(buffer)[:want]

    def found(self, path: Path, digest: int) -> Version:
        """Opens the version that an earlier process wrote at `path`, by its header. Raises CorruptFile, naming the file."""
        if not path.is_file():
            raise CorruptFile(f"{path} is missing.", path)
        with DirectFile(path) as file:
            length = header_size(self._head(file, PAGE), path)
            head, size = self._head(file, length), file.size
        if xxhash.xxh3_64_intdigest(head) != digest:
            raise CorruptFile(f"{path} is damaged, or not the file that was saved: its header differs. It was not used.", path)
        layout, metadata = decode_header(head, path)
        try:
            checksum = int(as_type(_Metadata, metadata).xxh3_64, 16)
        except ValueError as error:
            raise CorruptFile(f"{path} is not the home of a block ({error}). It was not used.", path) from None
        if size != length + layout.nbytes:
            raise CorruptFile(f"{path} has {size} bytes and was saved with {length + layout.nbytes}. It was not used.", path)
        return Version(path, layout, length, checksum, digest, durable=True)

    def pieces(self, version: Version, request: int, memory: Callable[[int, int], torch.Tensor]) -> Iterator[tuple[int, int]]:
        """Yields (offset, bytes) of each piece of the data once it is in `memory(offset, bytes)`; compares the checksum."""
        nbytes, digest, path = version.layout.nbytes, xxhash.xxh3_64(), version.path
        with DirectFile(path) as file:
            head = self._head(file, version.header)
            if xxhash.xxh3_64_intdigest(head) != version.digest:
                raise CorruptFile(f"{path} is not the file that this run wrote: its header differs. It was not used.", path)
            for at in range(0, nbytes, request):
                want = min(request, nbytes - at)
                piece = bytes_of(memory(at, want))
                if file.read_into(piece, version.header + at) < want:
                    raise CorruptFile(f"{path} is shorter than it was written. It was not used.", path)
                if version.checksummed:
                    digest.update(piece[:want])
                yield at, want
        if version.checksummed and digest.intdigest() != version.checksum:
            raise CorruptFile(f"{path} is damaged: its checksum is not the one that was written. It was not used.", path)

    def _head(self, file: DirectFile, length: int) -> bytes:
        memory = bytes_of(self._stage(length)[:length])
        got = file.read_into(memory, 0)  # the buffer may hold the header of an earlier file: use only the bytes read
        return bytes(memory[:got])

    def _readable(self, flat: torch.Tensor, at: int, want: int) -> memoryview:
        """Returns `want` bytes of `flat` from `at`, rounded up to pages, in host memory."""
        if self._device.is_host(flat):
            return bytes_of(flat[at : at + round_up(want)])
        stage = self._stage(want)[: round_up(want)]
        self._device.copy(flat[at : at + want], stage[:want])
        self._device.wait(self._device.mark())
        return bytes_of(stage)

    def _page_of(self, head: bytes) -> memoryview:
        page = bytes_of(self._stage(len(head))[: len(head)])
        page[:] = head
        return page

    def _stage(self, nbytes: int) -> torch.Tensor:
        """Returns host memory of this thread, two buffers in turn: one is filled while the other is copied to the device."""
        staging = self._staging
        staging.buffers.reverse()
        staging.busy.reverse()
        self._device.wait(staging.busy[0])
        if len(staging.buffers[0]) < nbytes:
            staging.buffers[0] = self._device.host(round_up(nbytes))
        return staging.buffers[0]


@functools.lru_cache(1024)
def _header_without_checksum(specs: tuple[TensorSpec, ...]) -> bytes:
    return encode_header(specs, _metadata(0))


class _Metadata(msgspec.Struct):
    format: str
    xxh3_64: Digest


def _metadata(checksum: int) -> dict[str, str]:
    return {"format": "pt", "xxh3_64": f"{checksum:016x}"}
