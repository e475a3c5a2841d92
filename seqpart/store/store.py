"""Stores named flat tensors at home: in host memory while the budget lasts, otherwise on disk.

`put` copies bytes in, `get` copies them out into memory that the caller owns, `discard` forgets. A disk home has
numbered versions: `put` writes one that is not needed and then makes it current, so a home is always whole. The disk blocks
of a version that is written over are reused, which doubles the speed against a new file that is renamed over the
old (benchmarks/LOG.md).

    needed   the current version; the one that was current at the last `mark`, for `rollback`; those that a
             checkpoint names, for `adopt` in a later process
    spare    every other one, to be written over: two files a home, four where two checkpoints are kept
"""

import os
import re
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from seqpart.device.device import DOWN, UP, Device, Event
from seqpart.device.pages import PAGE, aligned, bytes_of
from seqpart.errors import CorruptFile
from seqpart.files import remove
from seqpart.store.direct import explaining, sync
from seqpart.store.host_pool import HostPool
from seqpart.store.layout import Layout
from seqpart.store.movers import Watched, movers, unwatched
from seqpart.store.scratch import HOME_FILES
from seqpart.store.streams import Gathering, Sink, Source, in_order
from seqpart.store.tensor_file import TensorFiles, Version


@dataclass(slots=True)
class Traffic:
    """Bytes of tensors read from and written to the disk; headers are not counted."""

    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(slots=True)
class Home:
    layout: Layout
    host: torch.Tensor | None
    """The bytes of a home in host memory; owned by the host pool."""
    now: Version | None = None
    """The file with the bytes; for a home in host memory, the persisted copy of its present bytes."""
    marked: Version | None = None
    """Value of `now` at the mark before the last put."""
    epoch: int = -1
    """Number of marks before the last put."""
    files: set[str] = field(default_factory=set)
    """All versions on the disk, needed and spare."""
    copy: torch.Tensor | None = None
    """Host memory for copies of its tensors in 16 bits."""
    narrow: Layout | None = None
    """Layout of these copies, if they are of the present bytes."""


def named(version: Version | None) -> set[str]:
    return set() if version is None else {version.path.name}


class Transfer:
    """A transfer of tensors between home and the device; `nbytes` of it go by the disk."""

    def __init__(self, device: Device, parts: "Sequence[Future[Event]]" = (), nbytes: int = 0) -> None:
        self._device, self._parts, self.nbytes = device, parts, nbytes
        """Futures of the parts; the result of each is the event after it, once it was issued."""

    def wait(self) -> None:
        """Returns when every part is over; raises the first error of any."""
        wait(self._parts)
        for part in self._parts:
            self._device.wait(part.result())

    def follow(self) -> None:
        """Makes later work of the current stream wait until every part is over; raises the first error of any.

        Returns when every part was issued: on the CPU it is over then, and so are transfers by the disk."""
        wait(self._parts)
        for part in self._parts:
            self._device.after(part.result())

    def settle(self) -> None:
        """Returns when every part is over, however it ended: errors are reported elsewhere."""
        wait(self._parts)
        for part in self._parts:
            if part.exception() is None:
                self._device.wait(part.result())

    def going_on(self) -> "Transfer":
        """A transfer of the parts that are not over, on the device too, or failed; its bytes count as 0, since they were
        reported before."""
        over = {part for part in self._parts if part.done() and not part.exception() and self._device.is_over(part.result())}
        return Transfer(self._device, [part for part in self._parts if part not in over])

    def with_other(self, other: "Transfer") -> "Transfer":
        return Transfer(self._device, [*self._parts, *other._parts], self.nbytes + other.nbytes)


class RetainedFiles:
    """Names of kept files in `folder`. Removing a kept file is delayed until it is no longer kept.

    Raises StoreError where the disk fails.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: frozenset[str] = frozenset()
        self._unwanted: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def keep(self, names: Iterable[str]) -> None:
        """Keeps the files of these names and no others."""
        self._names = frozenset(names)
        self.remove(*(self._unwanted - self._names))
        self._unwanted &= self._names

    def remove(self, *names: str) -> None:
        """Deletes the files of these names, now or when they are no longer kept."""
        for name in names:
            if name in self._names:
                self._unwanted.add(name)
            else:
                with explaining(self._folder / name):
                    remove(self._folder / name)

    def sweep(self, ours: re.Pattern[str], used: Iterable[str]) -> None:
        """Removes files that a killed run left, except those in `used`; `ours` matches the names that runs give."""
        found = {path.name for path in self._folder.iterdir() if ours.fullmatch(path.name)}
        self.remove(*found.difference(used))


def at_once() -> None:
    """Returns at once: there is nothing to wait for."""


IO_THREADS = 2


class Store:
    """Homes under `folder`. Flat buffers are uint8, at least `layout.padded_nbytes` bytes, page-aligned on the CPU."""

    divides = False
    """True if weights are given by the ranks that keep them, at each load."""

    def __init__(self, folder: Path, device: Device, host_pool: HostPool | None = None) -> None:
        self.folder, self.traffic = folder, Traffic()
        self.watched: Watched = unwatched
        """Makes the context in which an I/O thread moves a home."""
        self._device, self._host_pool = device, host_pool
        self._files, self._retained = TensorFiles(device), RetainedFiles(folder)
        self.remembered: dict[str, dict[str, str]] = {}
        """The homes that `recall` restores, as `persist` describes them."""
        self._kept: frozenset[str] = frozenset()
        self._homes: dict[str, Home] = {}
        self._reserved: dict[str, torch.Tensor] | None = None
        """Host memory of homes that are planned to be there; None: given to homes as they come."""
        self._gone: dict[str, Home] = {}
        """Homes discarded since the mark: a rollback restores them."""
        self._epoch, self._host_epoch = 0, -1
        """Number of marks so far, and number before the last put into host memory."""
        self._puts: list[Future[Event]] = []
        self._lost: dict[str, tuple[int, Exception]] = {}
        """{home whose last put failed: (number of marks when it began, error)}: its bytes are wrong until it is put again, or
        rolled back to a mark before that."""
        self._count = threading.Lock()
        self._pool = movers(IO_THREADS, "seqpart-io")

    def close(self) -> None:
        self._pool.shutdown()

    def reserve(self, homes: Mapping[str, int]) -> None:
        """Reserves host memory for these homes (name: bytes), in this order while there is some, and for no others."""
        taken = {name: self._host_pool.take(nbytes) if self._host_pool is not None else None for name, nbytes in homes.items()}
        self._reserved = {name: host for name, host in taken.items() if host is not None}

    def _host_for(self, name: str, nbytes: int) -> torch.Tensor | None:
        if self._reserved is not None:
            return self._reserved.pop(name, None)
        return self._host_pool.take(nbytes) if self._host_pool is not None else None

    def __contains__(self, name: str) -> bool:
        return name in self._homes

    def owns(self, name: str) -> bool:
        """True if this rank keeps the home; one process alone keeps all."""
        return True

    def tier(self, name: str) -> str:
        return self._device.host_tier if self._homes[name].host is not None else "disk"

    def layout(self, name: str) -> Layout:
        return self._homes[name].layout

    def path(self, name: str) -> Path | None:
        """The file that holds `name` now; None when it is in host memory."""
        home = self._homes[name]
        return home.now.path if home.host is None and home.now is not None else None

    def in_place(self, name: str, layout: Layout) -> torch.Tensor:
        """Returns the host memory of a home, a new one of zeros if there is none, whose bytes the caller is about to change. No
        put or get of it may be underway."""
        is_new = name not in self._homes
        home = self._place(name, layout)
        assert home.host is not None, f"{name} was planned to be in host memory"
        if is_new:
            home.host.zero_()
        self._will_change(home, self._epoch)
        return home.host

    def put(self, name: str, layout: Layout, flat: torch.Tensor) -> None:
        """Copies `layout.nbytes` bytes of `flat` home. The old version stays until the new one is whole."""
        self._put(name, layout, flat, self._epoch, True)

    def get(self, name: str, flat: torch.Tensor) -> None:
        """Copies the bytes of `name` into `flat`. Raises CorruptFile, naming the file, unless they are what was put."""
        home = self._homes[name]
        if home.host is not None:
            self._copy(home.host[: home.layout.nbytes], flat[: home.layout.nbytes])
            return
        assert home.now is not None, f"{name} is not written yet"
        self._files.read(home.now, flat)
        with self._count:
            self.traffic.bytes_read += home.layout.nbytes

    def narrow(self, name: str, copy: str, layout: Layout) -> None:
        """Copies tensors of a home in host memory in 16 bits, if there is memory that was reserved for `copy`. Until the home
        changes, `begin_get` may bring these."""
        home = self._homes[name]
        if home.copy is None and self._reserved is not None:
            home.copy = self._reserved.pop(copy, None)
        if home.host is not None and home.copy is not None:
            wide = home.layout.views(home.host)
            for tensor, view in layout.views(home.copy).items():
                view.copy_(wide[tensor])
            home.narrow = layout

    def _get_narrow(self, name: str, flat: torch.Tensor) -> None:
        """Copies `name` to the device, tensors with a copy in 16 bits by that.

        A copy comes to the second half of its tensor's memory, and its first half is widened into the first half of that; then
        half of what is left, and so on. The last few numbers come as they are.
        """
        home = self._homes[name]
        if home.host is None or home.copy is None or home.narrow is None:
            self.get(name, flat)
            return
        narrow, exact = {spec.name: spec for spec in home.narrow.specs}, 0
        for spec in (spec for spec in home.layout.specs if spec.name in narrow):
            half, start, end = narrow[spec.name], spec.offset, spec.offset + spec.nbytes
            self._copy(home.host[exact:start], flat[exact:start])
            self._copy(home.copy[half.offset : half.offset + half.nbytes], flat[end - half.nbytes : end])
            exact = start + 4 * _widen(flat[start:end])
        self._copy(home.host[exact : home.layout.nbytes], flat[exact : home.layout.nbytes])

    def refuse_lost(self) -> None:
        """Raises the error of a failed put that has left a home with wrong bytes."""
        for _, error in self._lost.values():
            raise error

    def begin_put(
        self, items: Iterable[tuple[str, Layout, torch.Tensor]], after: Callable[[], object], *, checksummed: bool = True
    ) -> "Transfer":
        """Starts to `put` each of `items` in the I/O threads, once `after` returns there. Their memory must not change.

        The put counts as made before the next `mark`, also if it ends after that. Without `checksummed` files get their
        checksums only when they are persisted.
        """
        work = list(items)
        for name, layout, _ in work:  # placed here, so that the same order of homes gives the same places in host memory
            self._place(name, layout)
        nbytes = sum(layout.nbytes for name, layout, _ in work if self._homes[name].host is None)
        parts = [self._pool.submit(self._move, DOWN, after, self._put, [*item, self._epoch, checksummed]) for item in work]
        self._puts = [put for put in self._puts if not put.done()] + parts
        return Transfer(self._device, parts, nbytes)

    def begin_get(
        self, items: Iterable[tuple[str, torch.Tensor]], after: Callable[[], object], *, narrow: bool = False
    ) -> "Transfer":
        """Starts to `get` each of `items` in the I/O threads, once `after` returns there; with no items, runs `after` alone.

        narrow: tensors with a copy in 16 bits may come by that, see `narrow`.
        """
        work = list(items)
        nbytes = sum(self._homes[name].layout.nbytes for name, _ in work if self._homes[name].host is None)
        parts = [self._pool.submit(self._move, UP, after, self._get_narrow if narrow else self.get, [*item]) for item in work]
        return Transfer(self._device, parts or [self._pool.submit(self._move, UP, after, at_once, [])], nbytes)

    def _move(self, way: str, after: Callable[[], object], work: Callable[..., None], arguments: list[Any]) -> Event:
        """Moves a home; returns the event after it. Takes the arguments out of their list: a thread of the pool releases a job,
        and the memory that it was given, only some time after it has reported the job as done."""
        with self._device.copying(way):
            after()
            taken = tuple(arguments)
            arguments.clear()
            with self._seen(way, *taken[:1]):
                work(*taken)
            return self._device.mark()

    def _seen(self, way: str, name: str = "") -> AbstractContextManager[None]:
        if not name:
            return unwatched(way, name)
        tier, stream = self.tier(name), "prefetch" if way == UP else "write-back"
        link = f"{tier} to device" if way == UP else f"device to {tier}"
        return self.watched(stream, name, link=link, nbytes=self._homes[name].layout.nbytes)

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Returns the tensors of a home, in new memory."""
        layout = self.layout(name)
        flat = aligned(layout.padded_nbytes)
        self.get(name, flat)
        return layout.views(flat)

    def get_all(self, items: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.begin_get(items, at_once).wait()

    def discard(self, name: str) -> None:
        home = self._homes.pop(name, None)
        self._lost.pop(name, None)
        if home is None:
            return
        if home.host is not None:
            if self._reserved is not None:
                self._reserved[name] = home.host
            elif self._host_pool is not None:
                self._host_pool.give(home.host)
            home.now = None
            self._note_host(self._epoch)
        self._go_back(home)
        self._retained.remove(*(home.files - named(home.now)))
        home.files = named(home.now)
        if home.now is not None:
            self._gone[name] = home

    def mark(self) -> None:
        """Makes the present homes, with puts that have begun, the state that `rollback` restores."""
        self._epoch += 1
        for home in self._gone.values():
            self._retained.remove(*home.files)
        self._gone.clear()

    @property
    def can_roll_back(self) -> bool:
        """False when a home in host memory, which has one version only, was written or discarded since the mark."""
        return self._host_epoch < self._epoch

    def rollback(self) -> bool:
        """Restores every home to its state at the mark; returns False and does nothing if it cannot. No put may be underway."""
        self._assert_at_rest()
        if not self.can_roll_back:
            return False
        for name, home in [*self._homes.items(), *self._gone.items()]:
            self._go_back(home)
            self._homes[name] = home
            if home.now is None and home.host is None:
                del self._homes[name]
                self._retained.remove(*home.files)
        self._gone.clear()
        self._lost = {name: lost for name, lost in self._lost.items() if lost[0] < self._epoch}
        return True

    def persist(self, names: Iterable[str] | None = None) -> dict[str, dict[str, str]]:
        """Writes all homes, or those of `names`, to the disk; returns the files with which another process can `adopt` them. No
        put may be underway.

        A home in host memory is written if it changed since the last time; it stays in host memory as well. Raises the error of
        a failed put that was not repaired.
        """
        self._assert_at_rest()
        self.refuse_lost()
        homes = self._homes if names is None else {name: self._homes[name] for name in names}
        self._all([self._pool.submit(self._persist, name, home) for name, home in homes.items()])
        sync(self.folder)
        return {
            name: {"file": home.now.path.name, "header": f"{home.now.digest:016x}"}
            for name, home in homes.items()
            if home.now is not None
        }

    def keep(self, files: Iterable[str]) -> None:
        """Protects these files, the remembered ones and no others from `put` and `discard`."""
        self._kept = frozenset(files)
        self._retained.keep(self._kept.union(entry["file"] for entry in self.remembered.values()))

    def remember(self, names: Iterable[str]) -> None:
        """Keeps the present versions of these homes until others are remembered. No put may be underway."""
        self.remembered = self.persist(names)
        self.keep(self._kept)

    def recall(self, *, check_only: bool = False) -> None:
        """Restores the remembered homes; no put may be underway. Raises CorruptFile, naming a file that is damaged."""
        self._assert_at_rest()
        for name, entry in self.remembered.items():
            version = self._files.found(self.folder / entry["file"], int(entry["header"], 16))
            if name in self._homes and version.layout != self._homes[name].layout:
                raise CorruptFile(f"{version.path} is no earlier version of {name}. It was not used.", version.path)
            self._files.check(version)
            if not check_only:
                home = self._place(name, version.layout)
                home.now, home.layout = version, version.layout
                home.files.add(version.path.name)
                if home.host is not None:
                    self._fill(home)

    def adopt(self, described: Mapping[str, Mapping[str, str]]) -> None:
        """Takes over the homes that another process persisted in `folder`; removes other files there, except kept ones.

        Raises CorruptFile, naming a file that is missing, of another length or of another header. Data on the disk are read by
        `verify`; data that go to host memory are read, and verified, here.
        """
        files = [self.folder / entry["file"] for entry in described.values()]
        digests = [int(entry["header"], 16) for entry in described.values()]
        for name, version in zip(described, self._pool.map(self._files.found, files, digests), strict=True):
            host = self._host_for(name, version.layout.nbytes)
            self._homes[name] = Home(version.layout, host, now=version, files={version.path.name})
        self._all([self._pool.submit(self._fill, home) for home in self._homes.values() if home.host is not None])
        self._retained.sweep(HOME_FILES, [file.name for file in files])

    def lay_anew(self, layouts: Mapping[str, Layout], growing: Container[str] = ()) -> None:
        """Rewrites existing homes in these layouts: an earlier version of seqpart used others.

        growing: homes that may have fewer tensors; missing ones become zeros. A home with other tensors is left as it is.
        """
        for name, layout in layouts.items():
            if name not in self or self.layout(name) == layout:
                continue
            now = self.layout(name)
            had, wanted = ({replace(spec, offset=0) for spec in one.specs} for one in (now, layout))
            if not (had <= wanted if name in growing else had == wanted):
                continue
            views, other = self.read(name), aligned(layout.padded_nbytes)
            for tensor, view in layout.views(other).items():
                if tensor in views:
                    view.copy_(views[tensor])
            self.put(name, layout, other)

    def verify(self) -> None:
        """Reads every home on the disk once. Raises CorruptFile, naming the first one that is damaged."""
        parts = [home.now for home in self._homes.values() if home.host is None and home.now is not None]
        self._all([self._pool.submit(self._files.check, version) for version in parts])

    def _all(self, work: "Sequence[Future[None]]") -> None:
        """Waits for work that does not use the device; raises the first error of any."""
        Transfer(self._device, work).wait()

    def _place(self, name: str, layout: Layout) -> Home:
        """Returns the home of `name`: the present one, one that was discarded since the mark, or a new one."""
        if name in self._gone:
            self._homes[name] = self._gone.pop(name)
        if name not in self._homes:
            self._homes[name] = Home(layout, self._host_for(name, layout.nbytes))
        return self._homes[name]

    def source(self, name: str, request: int) -> Source:
        """Returns a source of the tensors of `name` in order, read in pieces of `request` bytes. It must be closed."""
        home = self._homes[name]
        if home.host is not None:
            return Source([bytes_of(home.host[: home.layout.nbytes])], home.layout)
        assert home.now is not None, f"{name} is not written yet"
        with self._count:
            self.traffic.bytes_read += home.layout.nbytes
        return Source(self._files.chunks(home.now, request), home.layout)

    @contextmanager
    def sink(self, name: str, layout: Layout, request: int) -> Iterator[Sink]:
        """A context in which the tensors of `name` are appended in order; after it they are its home."""
        home = self._place(name, layout)
        self._will_change(home, self._epoch)
        if home.host is not None:
            yield Sink(in_order(bytes_of(home.host[: layout.nbytes])), layout)
        else:
            with self._new_version(name, home) as path, self._files.writing(path, layout) as writing:
                gathering = Gathering(writing.append, min(request, max(PAGE, layout.padded_nbytes)))
                yield Sink(gathering.append, layout)
                gathering.flush()
                home.now = writing.finish()
        home.layout = layout

    def _will_change(self, home: Home, epoch: int) -> None:
        home.narrow = None
        if home.host is not None:
            home.now = None
            self._note_host(epoch)
        elif home.epoch != epoch:
            home.marked, home.epoch = home.now, epoch

    def _put(self, name: str, layout: Layout, flat: torch.Tensor, epoch: int, checksummed: bool) -> None:
        home = self._place(name, layout)
        self._will_change(home, epoch)
        try:
            if home.host is not None:
                self._copy(flat[: layout.nbytes], home.host[: layout.nbytes])
            else:
                with self._new_version(name, home) as path:
                    home.now = self._files.write(path, layout, flat, checksummed=checksummed)
        except Exception as error:
            self._lost[name] = epoch, error
            raise
        self._lost.pop(name, None)
        home.layout = layout

    @contextmanager
    def _new_version(self, name: str, home: Home) -> Iterator[Path]:
        spare = self._spare(name, home)
        home.files.add(spare)
        try:
            yield self.folder / spare
        except BaseException:
            home.files.discard(spare)
            if home.now is None and home.host is None:
                del self._homes[name]  # it was never written
            raise
        assert home.now is not None
        with self._count:
            self.traffic.bytes_written += home.now.layout.nbytes

    def _spare(self, name: str, home: Home) -> str:
        """File name of a version to write: an existing spare one, whose disk blocks are reused, or a new one."""
        needed = named(home.now) | named(home.marked)
        for file in sorted(home.files - needed):
            if file not in self._retained:
                return file
        files = (f"{name}.{number}.safetensors" for number in count())
        return next(file for file in files if file not in self._retained and not os.path.lexists(self.folder / file))

    def _go_back(self, home: Home) -> None:
        if home.epoch == self._epoch:
            home.now, home.epoch = home.marked, self._epoch - 1
            home.layout = home.now.layout if home.now is not None else home.layout

    def _persist(self, name: str, home: Home) -> None:
        if home.now is None:
            assert home.host is not None, f"{name} is not written yet"
            with self._new_version(name, home) as path:
                home.now = self._files.write(path, home.layout, home.host)
        assert home.now is not None
        self._files.add_checksum(home.now)
        if not home.now.durable:
            sync(home.now.path)
            home.now.durable = True

    def _fill(self, home: Home) -> None:
        assert home.now is not None and home.host is not None
        self._files.read(home.now, home.host)
        home.narrow = None

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies flat bytes; on the host in the calling thread alone: copy_ would start an OpenMP team in every I/O thread."""
        if self._device.is_host(source) and self._device.is_host(target):
            bytes_of(target)[:] = bytes_of(source)
        else:
            self._device.copy(source, target)

    def _note_host(self, epoch: int) -> None:
        with self._count:
            self._host_epoch = max(self._host_epoch, epoch)

    def _assert_at_rest(self) -> None:
        assert all(put.done() for put in self._puts), "homes are still being written: wait for their transfers first"


def _widen(flat: torch.Tensor) -> int:
    """Widens numbers of bfloat16 in the second half of `flat` to float32, but for the last few; returns how many."""
    wide, done = flat.view(torch.float32), 0
    narrow = flat.view(torch.bfloat16)[len(wide) :]
    while (more := (len(wide) - done) // 2) >= _FEW:  # what is written ends before what is yet to be read
        wide[done : done + more].copy_(narrow[done : done + more])
        done += more
    return done


_FEW = 64
"""Numbers that are not worth a kernel of their own."""
