"""Moves tables of NVIDIA's libraries, which a CPU run does not use, out of memory.

torch's CUDA build loads the libraries whether or not there is a GPU, and while they load they fill 103 MB of anonymous
memory, 92 of them in cuBLASLt: a third of what the imported libraries hold. Only work on a GPU reads them.
"""

import ctypes
import mmap
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_LIBRARIES = ("libcublas", "libcufft", "libcusparse", "libnvJitLink", "libnvrtc")
_DRIVER = "libcuda.so"
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_LASTING = "/var/tmp"
"""Directory for temporary files on a disk: /tmp lies in memory on many systems, so nothing would be gained there."""
_WORTH = 1 << 20
"""Smaller mappings, in bytes, are left alone."""
_MOUNTS = Path("/proc/self/mountinfo")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ *(.*)")
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value


@dataclass(slots=True)
class _Mapping:
    """A mapping in /proc/self/smaps, with its bytes in anonymous memory."""

    start: int
    end: int
    access: str
    path: str
    anonymous: int = 0

    @property
    def size(self) -> int:
        return self.end - self.start


def may_use_gpu() -> bool:
    """True if NVIDIA's driver is present."""
    return any(path.exists() for path in _DRIVER_FILES)


@cache
def release_gpu_tables() -> int:
    """Moves the tables of NVIDIA's libraries to a file without a name, once. Returns the bytes that left memory.

    The pages are mapped from the file to their old addresses, so that a library that is used after all reads them from
    the disk and writes to copies of its own. Nothing is moved if a GPU may be in use, which could write meanwhile, or
    where the system does not support it: the runtime is then larger.
    """
    cuda: Any = sys.modules.get("torch.cuda")
    if cuda is not None and hasattr(cuda, "is_initialized") and cuda.is_initialized():
        return 0
    try:
        mappings = _mappings()
        if any(_DRIVER in mapping.path for mapping in mappings):
            return 0
        libc = ctypes.CDLL(None, use_errno=True)
        return sum(mapping.anonymous for mapping in _gpu_tables(mappings) if _release(libc, mapping))
    except (OSError, AttributeError):  # no /proc, no directory, no mremap
        return 0


def _mappings() -> list[_Mapping]:
    found: list[_Mapping] = []
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if head := _MAPPING.match(line):
                found.append(_Mapping(int(head[1], 16), int(head[2], 16), head[3], head[4]))
            elif line.startswith("Anonymous:"):
                found[-1].anonymous = int(line.split()[1]) << 10
    return found


def _gpu_tables(mappings: list[_Mapping]) -> Iterator[_Mapping]:
    """Mappings of the libraries that lie mostly in anonymous memory.

    A library's zeroed data has no path, and may have grown together with what lies above: it is taken only between
    two mappings of one library, where no other memory can be.
    """
    for before, mapping, after in zip(mappings, mappings[1:], mappings[2:], strict=False):
        enclosed = before.path == after.path and before.end == mapping.start and mapping.end == after.start
        path = mapping.path or (before.path if enclosed else "")
        worth = mapping.anonymous >= _WORTH and 2 * mapping.anonymous >= mapping.size
        if worth and mapping.access in ("rw-p", "r--p") and Path(path).name.startswith(_LIBRARIES):
            yield mapping


def _release(libc: ctypes.CDLL, mapping: _Mapping) -> bool:
    """Writes the mapping to a file, compares the two, and maps the file in its place. Returns True if that worked."""
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    address, size = ctypes.c_void_p(mapping.start), ctypes.c_size_t(mapping.size)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if "w" in mapping.access else 0)
    with tempfile.TemporaryFile(dir=_LASTING, buffering=0) as file:
        number = file.fileno()
        if _in_memory(number) or file.write((ctypes.c_char * mapping.size).from_address(mapping.start)) != mapping.size:
            return False
        os.fdatasync(number)
        copy = ctypes.c_void_p(libc.mmap(None, size, access, mmap.MAP_PRIVATE, number, ctypes.c_long(0)))
        if copy.value == _FAILED:
            return False
        moved = (
            libc.memcmp(copy, address, size) == 0
            and libc.mremap(copy, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) == mapping.start
        )
        if moved:
            libc.madvise(address, size, mmap.MADV_DONTNEED)  # the pages that were compared
        else:
            libc.munmap(copy, size)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    return bool(moved)


def _in_memory(descriptor: int) -> bool:
    """True if the file is on a file system in memory."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = [line.split() for line in _MOUNTS.read_text().splitlines()]
    return any(words[2] == number and words[words.index("-") + 1] in ("tmpfs", "ramfs") for words in lines)
