"""Named flat tensors at home: in host memory while the budget lasts, else on disk.

`put` copies bytes in, `get` copies them out into memory that the caller owns, `discard` forgets. A disk home is a
safetensors file in two versions: `put` writes the one that is not current and then makes it current, so a home is
always whole. The old version's blocks on the disk are used again, which doubles the speed of rewriting against a new
file that is renamed over the old (benchmarks/LOG.md). The checksum is read back with the bytes, so a damaged home is
named and never trained on.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from seqpart.arena import Arena
from seqpart.device import Device
from seqpart.direct import REQUEST, DirectFile, bytes_of, round_up
from seqpart.errors import CorruptFile, StoreError
from seqpart.layout import Layout, decode_header, encode_header

IO_THREADS = 2


@dataclass(slots=True)
class Traffic:
    """Bytes of tensors read from and written to the disk; headers are not counted."""

    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(slots=True)
class _Home:
    layout: Layout
    host: torch.Tensor | None
    """The bytes, when the home is in host memory; owned by the arena."""
    versions: tuple[Path, Path] | None
    """The files, when it is on disk."""
    current: int = 1
    header: int = 0
    checksum: int = 0

    @property
    def path(self) -> Path:
        assert self.versions is not None
        return self.versions[self.current]


class Transfer:
    """Tensors on their way between home and the device; `nbytes` of them by way of the disk."""

    def __init__(self, parts: "Sequence[Future[None]]" = (), nbytes: int = 0) -> None:
        self._parts, self.nbytes = parts, nbytes

    def wait(self) -> None:
        """Return when every part is over; raise the first error of any."""
        wait(self._parts)
        for part in self._parts:
            part.result()


class Store:
    """Homes under `folder`. Flat buffers are uint8, at least `layout.room` bytes, page-aligned on the CPU."""

    def __init__(self, folder: Path, device: Device, arena: Arena | None = None) -> None:
        self.folder, self.traffic = folder, Traffic()
        self._device, self._arena = device, arena
        self._homes: dict[str, _Home] = {}
        self._staging = threading.local()
        self._count = threading.Lock()
        # Started now, so that the threads' stacks are part of the runtime and not of somebody's partition.
        self._pool = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="seqpart-io")
        ready = threading.Barrier(IO_THREADS + 1)
        for _ in range(IO_THREADS):
            self._pool.submit(ready.wait)
        ready.wait()

    def close(self) -> None:
        self._pool.shutdown()

    def __contains__(self, name: str) -> bool:
        return name in self._homes

    def tier(self, name: str) -> str:
        return self._device.host_tier if self._homes[name].host is not None else "disk"

    def layout(self, name: str) -> Layout:
        return self._homes[name].layout

    def path(self, name: str) -> Path | None:
        """The file that holds `name` now; None when it is in host memory."""
        home = self._homes[name]
        return home.path if home.versions is not None else None

    def checksum(self, name: str) -> int:
        return self._homes[name].checksum

    def put(self, name: str, layout: Layout, flat: torch.Tensor) -> None:
        """Copy `layout.nbytes` bytes of `flat` home. The old version stays until the new one is whole."""
        home = self._homes.get(name) or self._place(name, layout)
        if home.host is not None:
            _copy(flat[: layout.nbytes], home.host[: layout.nbytes])
        else:
            self._write(home, layout, flat)
        home.layout = layout
        self._homes[name] = home

    def get(self, name: str, flat: torch.Tensor) -> None:
        """Copy the bytes of `name` into `flat`. Raises CorruptFile, naming the file, unless they are what was put."""
        home = self._homes[name]
        if home.host is not None:
            _copy(home.host[: home.layout.nbytes], flat[: home.layout.nbytes])
            return
        self._read(home, flat)

    def begin_put(self, items: Iterable[tuple[str, Layout, torch.Tensor]], after: Callable[[], object]) -> "Transfer":
        """Start to `put` each of `items` in the I/O threads, once `after` has returned there. Their memory must rest."""
        work = list(items)
        for name, layout, _ in work:  # placed here, so that one order of homes is one use of the host memory
            if name not in self._homes:
                self._homes[name] = self._place(name, layout)
        nbytes = sum(layout.nbytes for name, layout, _ in work if self._homes[name].host is None)
        return Transfer([self._pool.submit(_later, after, self.put, item) for item in work], nbytes)

    def begin_get(self, items: Iterable[tuple[str, torch.Tensor]], after: Callable[[], object]) -> "Transfer":
        """Start to `get` each of `items` in the I/O threads, once `after` has returned there."""
        work = list(items)
        nbytes = sum(self._homes[name].layout.nbytes for name, _ in work if self._homes[name].host is None)
        return Transfer([self._pool.submit(_later, after, self.get, item) for item in work], nbytes)

    def put_all(self, items: Iterable[tuple[str, Layout, torch.Tensor]]) -> None:
        self.begin_put(items, _at_once).wait()

    def get_all(self, items: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.begin_get(items, _at_once).wait()

    def discard(self, name: str) -> None:
        home = self._homes.pop(name, None)
        if home is None:
            return
        if home.host is not None and self._arena is not None:
            self._arena.give(home.host)
        for path in home.versions or ():
            path.unlink(missing_ok=True)

    def _place(self, name: str, layout: Layout) -> _Home:
        host = self._arena.take(layout.nbytes) if self._arena is not None else None
        if host is not None:
            return _Home(layout, host, None)
        return _Home(layout, None, (self.folder / f"{name}.0.safetensors", self.folder / f"{name}.1.safetensors"))

    def _write(self, home: _Home, layout: Layout, flat: torch.Tensor) -> None:
        assert home.versions is not None
        nbytes, digest = layout.nbytes, xxhash.xxh3_64()
        # The checksum goes into the header, so the header's size must not depend on it: its digits are always as many.
        length = len(encode_header(layout.specs, _metadata(0)))
        spare = home.versions[1 - home.current]
        try:
            with DirectFile(spare, write=True, keep=True) as file:
                for at in range(0, nbytes, REQUEST):
                    want = min(REQUEST, nbytes - at)
                    memory = self._readable(flat, at, want)
                    digest.update(memory[:want])
                    file.write_from(memory, length + at)
                file.write_from(self._page_of(encode_header(layout.specs, _metadata(digest.intdigest()))), 0)
                file.finish(length + nbytes)
        except StoreError:
            spare.unlink(missing_ok=True)
            raise
        home.header, home.checksum, home.current = length, digest.intdigest(), 1 - home.current
        with self._count:
            self.traffic.bytes_written += nbytes

    def _read(self, home: _Home, flat: torch.Tensor) -> None:
        nbytes, digest = home.layout.nbytes, xxhash.xxh3_64()
        with DirectFile(home.path) as file:
            self._check_header(file, home)
            for at in range(0, nbytes, REQUEST):
                want = min(REQUEST, nbytes - at)
                if flat.device.type == "cpu":
                    memory = bytes_of(flat[at : at + round_up(want)])
                else:
                    memory = bytes_of(self._stage(want)[: round_up(want)])
                if file.read_into(memory, home.header + at) < want:
                    raise CorruptFile(f"{home.path} is shorter than it was written. Start again in a new --output-dir.")
                digest.update(memory[:want])
                if flat.device.type != "cpu":
                    # Waits for the copy: the staging buffer is about to be filled again.
                    flat[at : at + want].copy_(self._stage(want)[:want])
        if digest.intdigest() != home.checksum:
            raise CorruptFile(f"{home.path} is damaged: its checksum is not the one that was written. It was not used.")
        with self._count:
            self.traffic.bytes_read += nbytes

    def _check_header(self, file: DirectFile, home: _Home) -> None:
        head = bytes_of(self._stage(home.header)[: home.header])
        got = file.read_into(head, 0)  # the buffer may hold the header of an earlier file: look at what was read only
        if decode_header(bytes(head[:got]), home.path) != (home.layout, _metadata(home.checksum)):
            raise CorruptFile(f"{home.path} is not the file that this run wrote: its header differs. It was not used.")

    def _readable(self, flat: torch.Tensor, at: int, want: int) -> memoryview:
        """`want` bytes of `flat` from `at`, rounded up to pages, in host memory."""
        if flat.device.type == "cpu":
            return bytes_of(flat[at : at + round_up(want)])
        stage = self._stage(want)[: round_up(want)]
        stage[:want].copy_(flat[at : at + want])
        return bytes_of(stage)

    def _page_of(self, head: bytes) -> memoryview:
        page = bytes_of(self._stage(len(head))[: len(head)])
        page[:] = head
        return page

    def _stage(self, nbytes: int) -> torch.Tensor:
        """Host memory of this thread's own, reused: a header's pages on CPU, one request's worth on CUDA."""
        buffer: torch.Tensor | None = getattr(self._staging, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._staging.buffer = self._device.host(round_up(nbytes))
        return buffer


def _at_once() -> None:
    """Nothing to wait for."""


def _later(after: Callable[[], object], work: Callable[..., None], arguments: Sequence[Any]) -> None:
    after()
    work(*arguments)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Flat bytes, by the calling thread alone: between CPU tensors copy_ would start an OpenMP team in every I/O thread."""
    if source.device.type == target.device.type == "cpu":
        bytes_of(target)[:] = bytes_of(source)
    else:
        target.copy_(source)


def _metadata(checksum: int) -> dict[str, str]:
    return {"format": "pt", "xxh3_64": f"{checksum:016x}"}
