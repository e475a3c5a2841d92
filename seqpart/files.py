"""Creates, opens, replaces and removes seqpart's files by name, and never follows a link in their place.

In a directory where others may write, or that was copied or unpacked, a file's name may be a symbolic link to somebody's
file, a hard link to one, a pipe or a directory. So only plain files are read; only new files, or files without another hard
link, are written; and only plain files are removed.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self

PRIVATE = 0o600
"""Mode of files with the user's data or weights, which may lie in a directory that others use too."""
PRIVATE_FOLDER = 0o700
_PLAIN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags that follow no link and never block on a pipe; on a plain file O_NONBLOCK changes nothing."""
HALF_WRITTEN = re.compile(r".+\.seqpart-[0-9a-f]{8}\.part")
"""Matches the names that `aside` returns."""


def opened(path: str | Path, flags: int = os.O_RDONLY, *, dir_fd: int | None = None) -> int:
    """Opens a plain file. Raises OSError: ELOOP if it is a link, EISDIR or ESPIPE if it is no file."""
    handle = os.open(path, flags | _PLAIN, dir_fd=dir_fd)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ESPIPE
        raise OSError(number, os.strerror(number), str(path))
    return handle


def made(path: Path, mode: int = PRIVATE, *, flags: int = 0) -> int:
    """Opens a new, empty file for reading and writing. Whatever had its name loses only that name.

    A device, such as /dev/null or /dev/stdout, keeps its name and is opened for writing. Raises OSError for a disk.
    """
    flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAIN
    with contextlib.suppress(FileExistsError):
        return os.open(path, flags, mode)
    if is_device(path):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    path.unlink()
    return os.open(path, flags, mode)


def is_device(path: Path) -> bool:
    """True for a character device, or a link in /dev or /proc, whose name root could remove for everybody. Raises OSError for
    a disk."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    if stat.S_ISBLK(mode):
        raise OSError(errno.ENOTBLK, "it is a disk", str(path))
    return stat.S_ISCHR(mode) or (stat.S_ISLNK(mode) and f"{path.parent.resolve()}/".startswith(("/dev/", "/proc/")))


def made_over(path: Path, *, flags: int = 0) -> int:
    """Opens a file like `made`, but overwrites a plain file without another hard link, to reuse its blocks on the disk."""
    with contextlib.suppress(OSError):
        handle = opened(path, os.O_RDWR | flags)
        if os.fstat(handle).st_nlink == 1:
            return handle
        os.close(handle)
    return made(path, flags=flags)


def added_to(path: Path) -> int:
    """Opens a plain file of lines for appending, or creates it; ends a last line that was cut off.

    A hard link to another file is replaced by a copy first.
    """
    try:
        handle = opened(path, os.O_RDWR | os.O_APPEND)
    except FileNotFoundError:
        return made(path, 0o666, flags=os.O_APPEND)
    if os.fstat(handle).st_nlink > 1:
        with open(handle, "rb") as file:
            held = file.read()
        handle = made(path, 0o666, flags=os.O_APPEND)
        write_all(handle, held)
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        os.write(handle, b"\n")
    return handle


def write_all(handle: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]


def aside(path: Path) -> Path:
    """Returns a unique name beside `path`, for a file that will replace it."""
    return path.with_name(f"{path.name}.seqpart-{secrets.token_hex(4)}.part")


def remove(name: str | Path, *, dir_fd: int | None = None) -> int:
    """Removes a plain file; returns its bytes. Returns 0 if it does not exist, or is no plain file, which stays."""
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            return 0
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return 0
    return found.st_size


class Folder:
    """A directory held open: all operations stay in this very directory, even if its name comes to lead elsewhere."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self._handle = path, handle

    @classmethod
    def at(cls, path: Path) -> Self:
        """Opens the directory at `path`, which may be a link."""
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def inside(self, name: str) -> "Folder":
        """Opens the directory `name` in this one. Raises OSError if there is none, or a link."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        return Folder(self.path / name, os.open(name, flags, dir_fd=self._handle))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    @property
    def uid(self) -> int:
        return os.fstat(self._handle).st_uid

    def is_at(self, path: Path) -> bool:
        """True if `path` still leads to this directory."""
        try:
            return os.path.samestat(os.fstat(self._handle), path.stat())
        except OSError:
            return False

    def make_private(self) -> None:
        """Closes it to other users. A directory of another user keeps its mode."""
        with contextlib.suppress(OSError):
            os.fchmod(self._handle, PRIVATE_FOLDER)

    def names(self) -> list[str]:
        return sorted(os.listdir(self._handle))  # noqa: PTH208 (of a descriptor)

    def holds(self, name: str) -> bool:
        """True if anything has that name, also a broken link."""
        try:
            os.stat(name, dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def open(self, name: str) -> int:
        return opened(name, dir_fd=self._handle)

    def read(self, name: str) -> tuple[str, os.stat_result]:
        """Returns the text of a plain file, and its stat. Raises OSError, and ValueError if it is no text."""
        with open(self.open(name), "rb") as file:
            return file.read().decode(), os.fstat(file.fileno())

    def size(self, name: str) -> int:
        """Returns the bytes of a plain file of the directory's owner; 0 for anything else."""
        try:
            found = os.stat(name, dir_fd=self._handle, follow_symlinks=False)
        except OSError:
            return 0
        return found.st_size if stat.S_ISREG(found.st_mode) and found.st_uid == self.uid else 0

    def remove(self, name: str) -> int:
        return remove(name, dir_fd=self._handle)

    def unlink(self, name: str) -> None:
        """Removes whatever has that name, also a link itself, if anything has."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._handle)

    def remove_folder(self, name: str) -> None:
        """Removes a directory if it is empty: somebody's files may be in it."""
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self._handle)


@contextlib.contextmanager
def folder_inside(folder: Folder, name: str) -> Iterator[Folder | None]:
    """Yields the directory `name` in `folder`; None if there is none, or a link."""
    try:
        found = folder.inside(name)
    except OSError:
        yield None
        return
    with found:
        yield found
