"""Page-aligned memory, as direct I/O, host memory and the device need it, and hooks to observe its use."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

PAGE = 4096


def round_up(size: int, to: int = PAGE) -> int:
    return -(-size // to) * to


def aligned_bytes(nbytes: int) -> int:
    """Bytes that `aligned(nbytes)` takes."""
    return max(PAGE, round_up(nbytes))


def aligned(nbytes: int) -> torch.Tensor:
    """Returns a new uint8 buffer, (round_up(nbytes),), that starts on a page. Owned by the caller; its pages are not touched.

    A mapping of its own, which leaves the process with it: on a heap that is kept it would be a hole, and threads have heaps
    of their own. Raises OSError (ENOMEM) where memory is refused.
    """
    whole = mmap.mmap(-1, aligned_bytes(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(whole, dtype=torch.uint8)[: round_up(nbytes)]


def lies_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill a piece of memory without gaps or overlap, in any order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU uint8 tensor, writable, not copied."""
    for watcher in _watchers:
        watcher(flat.data_ptr(), len(flat), write=True, disk=False)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


class Watcher(Protocol):
    """A function called before the processor uses memory, given by its address, or before that goes to or from a `disk`."""

    def __call__(self, address: int, nbytes: int, *, write: bool, disk: bool) -> None: ...


_watchers: list[Watcher] = []


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """A context in which `watcher` is called, in every thread, before files and their users access memory."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def count_file_pages(memory: memoryview, *, write: bool) -> None:
    for watcher in _watchers:
        watcher(np.frombuffer(memory, dtype=np.uint8).ctypes.data, len(memory), write=write, disk=True)
