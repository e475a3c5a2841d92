"""Files of ours: made, opened, replaced and removed under their own names, and never through a link that lies there.

Where others may write, or a directory was copied or unpacked, a name of ours may be a symbolic link to somebody's file, a
second name of one (a hard link), a pipe or a directory. What is read is a plain file of that very name; what is written is
a new file, or one that has no other name; what is removed is a plain file.
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
"""Of files with the user's data or weights, which may lie under a directory that others use too."""
PRIVATE_FOLDER = 0o700
_PLAIN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A pipe must not make us wait; on a plain file O_NONBLOCK changes nothing."""
HALF_WRITTEN = re.compile(r".+\.seqpart-[0-9a-f]{8}\.part")
"""Names that `aside` gives."""


def opened(path: str | Path, flags: int = os.O_RDONLY, *, dir_fd: int | None = None) -> int:
    """The plain file that is there. Raises OSError: ELOOP where it is a link, EISDIR or ESPIPE where it is no file."""
    handle = os.open(path, flags | _PLAIN, dir_fd=dir_fd)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ESPIPE
        raise OSError(number, os.strerror(number), str(path))
    return handle


def made(path: Path, mode: int = PRIVATE, *, flags: int = 0) -> int:
    """A new, empty file, open for reading and writing. Whatever had its name loses the name, and nothing else.

    A device, as /dev/null or /dev/stdout, keeps its name and is opened for writing. Raises OSError for a disk.
    """
    flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAIN
    with contextlib.suppress(FileExistsError):
        return os.open(path, flags, mode)
    if is_device(path):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    path.unlink()
    return os.open(path, flags, mode)


def is_device(path: Path) -> bool:
    """Whether it is one that takes text, whose name root could take away from everybody. Raises OSError for a disk."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    if stat.S_ISBLK(mode):
        raise OSError(errno.ENOTBLK, "it is a disk", str(path))
    return stat.S_ISCHR(mode) or (stat.S_ISLNK(mode) and f"{path.parent.resolve()}/".startswith(("/dev/", "/proc/")))


def made_over(path: Path, *, flags: int = 0) -> int:
    """As `made`, but a plain file without another name is written over: its blocks on the disk are used again."""
    with contextlib.suppress(OSError):
        handle = opened(path, os.O_RDWR | flags)
        if os.fstat(handle).st_nlink == 1:
            return handle
        os.close(handle)
    return made(path, flags=flags)


def added_to(path: Path) -> int:
    """A plain file of lines to write behind what it holds, or a new one; a last line that was cut off is ended.

    A second name of a file becomes a copy of it first.
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


def write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def aside(path: Path) -> Path:
    """A name beside `path` that nobody else has, to write what is to take its place."""
    return path.with_name(f"{path.name}.seqpart-{secrets.token_hex(4)}.part")


def remove(name: str | Path, *, dir_fd: int | None = None) -> int:
    """Remove a plain file; returns its bytes. What is missing is gone already, and what is no plain file stays."""
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            return 0
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return 0
    return found.st_size


class Folder:
    """A directory held open: what is looked at and removed in it is in this very one, wherever its name leads by then."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self._handle = path, handle

    @classmethod
    def at(cls, path: Path) -> Self:
        """The directory that the user named, by a link if he likes."""
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def inside(self, name: str) -> "Folder":
        """The directory `name` in this one. Raises OSError where there is none, or a link."""
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
        """Whether `path` still leads here."""
        try:
            return os.path.samestat(os.fstat(self._handle), path.stat())
        except OSError:
            return False

    def make_private(self) -> None:
        """Close it to other users. What another user owns stays as open as he wants it."""
        with contextlib.suppress(OSError):
            os.fchmod(self._handle, PRIVATE_FOLDER)

    def names(self) -> list[str]:
        return sorted(os.listdir(self._handle))  # noqa: PTH208 (of a descriptor)

    def holds(self, name: str) -> bool:
        """Whether anything has that name, a link that leads nowhere too."""
        try:
            os.stat(name, dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def open(self, name: str) -> int:
        return opened(name, dir_fd=self._handle)

    def read(self, name: str) -> tuple[str, os.stat_result]:
        """The text of a plain file, and whose it is. Raises OSError, and ValueError for what is no text."""
        with open(self.open(name), "rb") as file:
            return file.read().decode(), os.fstat(file.fileno())

    def size(self, name: str) -> int:
        """Bytes of a plain file of the directory's owner; 0 of anything else."""
        try:
            found = os.stat(name, dir_fd=self._handle, follow_symlinks=False)
        except OSError:
            return 0
        return found.st_size if stat.S_ISREG(found.st_mode) and found.st_uid == self.uid else 0

    def remove(self, name: str) -> int:
        return remove(name, dir_fd=self._handle)

    def unlink(self, name: str) -> None:
        """Remove what has that name, a link itself too, if anything has."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._handle)

    def remove_folder(self, name: str) -> None:
        """If it is empty: somebody's files may be in it."""
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self._handle)


@contextlib.contextmanager
def folder_inside(folder: Folder, name: str) -> Iterator[Folder | None]:
    """The directory `name` in `folder`; None where there is no such directory of its own."""
    try:
        found = folder.inside(name)
    except OSError:
        yield None
        return
    with found:
        yield found
