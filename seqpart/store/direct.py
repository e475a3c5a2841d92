"""Reads and writes files around the page cache, into buffers that are reused.

Why not mmap or plain read(): pages of the cache are memory that the limit does not see, and a private file mapping
counts against RLIMIT_DATA whole. O_DIRECT needs addresses, offsets and sizes in multiples of a page; where the file
system refuses it the same calls go through the cache and drop the pages afterwards.
"""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from seqpart.device.pages import PAGE, aligned, bytes_of, count_file_pages
from seqpart.errors import CorruptFile, DirectoryUnusable, DiskFull, StoreError, shown
from seqpart.files import PRIVATE, aside, made, made_over, opened

REQUEST = 8 << 20
"""Bytes of one read or write. 4-16 MiB reached the disk's full speed; more only costs buffers."""


class DirectFile:
    """One open file. Reads and writes take page-aligned memory, offsets and sizes (the end of the file may be ragged)."""

    def __init__(
        self, path: Path, *, write: bool = False, keep: bool = False, patch: bool = False, mode: int = PRIVATE
    ) -> None:  # fmt: skip
        """Opens a file to be read; or, with `write`, a new and empty file of that name.

        keep: write over the old file, unless it has another name too: its blocks on the disk are reused. patch: write to the
        existing file. mode: permissions of a new file, before the user's umask.
        """

        def descriptor(flags: int) -> int:
            if keep:
                return made_over(path, flags=flags)
            if write:
                return made(path, mode, flags=flags)
            return opened(path, (os.O_RDWR if patch else os.O_RDONLY) | flags)

        self._open(path, descriptor)

    @classmethod
    def unnamed(cls, folder: Path, *, hidden: bool = False) -> Self:
        """Opens a file in `folder` without a name, which is gone when it is closed, also if this process is killed.

        Where the file system has no such files it has a name of its own until it is open; with `hidden` it is then in the
        directory for temporary files.
        """
        file = cls.__new__(cls)
        file._open(folder, lambda flags: _nameless(folder, flags, hidden=hidden))
        return file

    def _open(self, path: Path, descriptor: Callable[[int], int]) -> None:
        self.path, self.direct = path, hasattr(os, "O_DIRECT")
        with explaining(path):
            try:
                self._fd = descriptor(os.O_DIRECT if self.direct else 0)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self.direct = False
                self._fd = descriptor(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return os.fstat(self._fd).st_size

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fills `memory` from `offset` on; returns the bytes read, fewer only at the end of the file."""
        done = 0
        count_file_pages(memory, write=True)
        while done < len(memory):
            try:
                got = os.preadv(self._fd, [memory[done : done + REQUEST]], offset + done)
            except OSError as error:
                if self._gave_up_direct(error):
                    continue
                raise explained(error, self.path) from None
            self._forget(offset + done, got)
            done += got
            if got % PAGE or not got:
                break
        return done

    def write_from(self, memory: memoryview, offset: int) -> None:
        done = 0
        count_file_pages(memory, write=False)
        while done < len(memory):
            try:
                done += os.pwritev(self._fd, [memory[done : done + REQUEST]], offset + done)
            except OSError as error:
                if self._gave_up_direct(error):
                    continue
                raise explained(error, self.path) from None

    def finish(self, length: int, *, durable: bool = False) -> None:
        """Cuts the padded end off at `length`; with `durable` the data is on the disk when this returns."""
        with explaining(self.path):
            os.ftruncate(self._fd, length)
            if durable or not self.direct:
                os.fsync(self._fd)
        self._forget(0, length)

    def _gave_up_direct(self, error: OSError) -> bool:
        """True if direct I/O was given up after `error`: some file systems accept the flag and refuse the transfer, and some
        virtual machines refuse memory that a GPU's driver has pinned (EFAULT)."""
        if error.errno not in (errno.EINVAL, errno.EFAULT) or not self.direct:
            return False
        self.direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return True

    def _forget(self, offset: int, length: int) -> None:
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)


def _nameless(folder: Path, flags: int, *, hidden: bool) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, PRIVATE)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    if hidden and not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    path = aside((Path(tempfile.gettempdir()) if hidden else folder) / "probe")
    handle = made(path, flags=flags)
    path.unlink()
    return handle


def sync(path: Path) -> None:
    """Returns when the file, or the folder's list of files, would survive a loss of power."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        # A folder that cannot be opened or synced is on a file system that orders its names itself, or not at all.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EACCES)):
            raise explained(error, path) from None


def explained(error: OSError, path: Path) -> StoreError:
    """Translates an OSError into words for the user."""
    name = shown(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        cure = "Free some space, or give another place with --offload-dir. Earlier files are untouched."
        return DiskFull(f"the disk is full: could not write {name}. {cure}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR) or (
        error.errno == errno.ENOENT and path.is_dir()  # as /proc, which takes no files
    ):
        return DirectoryUnusable(f"cannot use {name}: {error.strerror}. Give a directory that you may write to.")
    if error.errno == errno.ENOENT:
        return CorruptFile(f"{name} is missing: it was here when the run began. Start again in a new --output-dir.", path)
    if error.errno in (errno.ELOOP, errno.EISDIR, errno.ESPIPE, errno.ENXIO):
        return CorruptFile(f"{name} is a link, a directory or a pipe, and no file that seqpart wrote. It was not used.", path)
    if error.errno == errno.EFBIG:
        return StoreError(f"a file at {name} would be larger than this process may write (ulimit -f). Raise that limit.")
    return StoreError(f"reading or writing {name} failed: {error.strerror}.")


@contextmanager
def explaining(path: Path, words: Callable[[OSError, Path], StoreError] = explained) -> Iterator[None]:
    """A context in which an OSError is raised in `words` for the user; `path` is what could not be used."""
    try:
        yield
    except OSError as error:
        raise words(error, path) from None


def probe_disk(folder: Path, nbytes: int = 64 << 20, *, hidden: bool = False) -> tuple[float, float]:
    """Measures (read, write) speed in bytes/s of the disk under `folder`, with `nbytes` of a file without a name.

    The file is written over, as homes are in each update: a new file took 1.8 times as long, for its places on the disk.
    Takes the memory of one request, and at most half of the disk's free space. hidden: as in `DirectFile.unnamed`. Raises
    StoreError where the folder cannot be written.
    """
    if not folder.is_dir():
        raise DirectoryUnusable(f"cannot use {folder}: it is not a directory. Give a directory that you may write to.")
    nbytes = min(nbytes, max(PAGE, _free(folder) // 2 // PAGE * PAGE))
    memory, page = bytes_of(aligned(REQUEST)), os.urandom(PAGE)
    for begin in range(0, REQUEST, PAGE):  # in place: a second buffer would be most of the memory of a small network
        memory[begin : begin + PAGE] = page
    try:
        with DirectFile.unnamed(folder, hidden=hidden) as file:
            for durable in True, False:
                began = time.perf_counter()
                for offset in range(0, nbytes, REQUEST):
                    file.write_from(memory[: nbytes - offset], offset)
                file.finish(nbytes, durable=durable)
            write = nbytes / (time.perf_counter() - began)
            began = time.perf_counter()
            for offset in range(0, nbytes, REQUEST):
                file.read_into(memory[: nbytes - offset], offset)
            return nbytes / (time.perf_counter() - began), write
    except CorruptFile:  # it is not there because it could not be made, as in /proc
        raise DirectoryUnusable(f"cannot write in {folder}. Give a directory that you may write to.") from None


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise DirectoryUnusable(f"cannot use {folder}: {error.strerror}. Give a directory that you may write to.") from None
