"""Tables of NVIDIA's libraries, which a CPU run holds for nothing, and how they are put down.

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
"""For temporary files on a disk: where /tmp lies in memory, as many systems have it, nothing would be gained."""
_WORTH = 1 << 20
"""Bytes of a mapping below which it stays where it is."""
_MOUNTS = Path("/proc/self/mountinfo")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ *(.*)")
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value


@dataclass(slots=True)
class _Mapping:
    """One line of /proc/self/smaps, and the bytes of it that lie in anonymous memory."""

    start: int
    end: int
    access: str
    path: str
    anonymous: int = 0

    @property
    def size(self) -> int:
        return self.end - self.start


def may_use_gpu() -> bool:
    """Whether the driver is there."""
    return any(path.exists() for path in _DRIVER_FILES)


@cache
def release_gpu_tables() -> int:
    """Move what NVIDIA's libraries keep in memory to a file without a name, once. Returns the bytes that left the memory.

    The pages are mapped from the file to where they were, so that a library that is used after all reads them from
    the disk and writes to copies of its own. Nothing moves when a GPU may be in use, which could write meanwhile, or
    where the system offers no way: the runtime is then what it is.
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
    """Mappings of the libraries that lie in anonymous memory, for the most part.

    A library's zeroed data has no path, and may have grown together with what lies above: it is taken only between
    two mappings of one library, whose place nobody else gets.
    """
    for before, mapping, after in zip(mappings, mappings[1:], mappings[2:], strict=False):
        enclosed = before.path == after.path and before.end == mapping.start and mapping.end == after.start
        path = mapping.path or (before.path if enclosed else "")
        worth = mapping.anonymous >= _WORTH and 2 * mapping.anonymous >= mapping.size
        if worth and mapping.access in ("rw-p", "r--p") and Path(path).name.startswith(_LIBRARIES):
            yield mapping


def _release(libc: ctypes.CDLL, mapping: _Mapping) -> bool:
    """Write the mapping to a file, look whether that says the same, and put it in the mapping's place."""
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
    """Whether the file lies on a file system that is memory itself."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = [line.split() for line in _MOUNTS.read_text().splitlines()]
    return any(words[2] == number and words[words.index("-") + 1] in ("tmpfs", "ramfs") for words in lines)
