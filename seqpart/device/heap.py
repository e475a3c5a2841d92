"""Controls whether freed memory leaves the process at once, or is kept for later tensors.

    returned   every tensor over 64 KiB is a mapping of its own: the least memory, and exactly the live bytes. The kernel gives
               and clears each page anew: a third to a half of the time of an update whose tensors are small.
    kept       tensors lie on the C library's heap, which never shrinks: it is made as large as the plan says and touched
               before training begins, so that the predicted memory is there from the first step on.

[Note: a kept heap] Tensors are aligned: glibc cuts a piece of less than 100 bytes off the front and the back of each. It puts
these pieces into a cache of small pieces (tcache), from where small objects take them, and then a freed tensor leaves a hole
which is those bytes too small for the next one of its size. So a heap grew to 1.3 to 1.7 times the bytes alive at once where
a network is trained as one partition, 2.1 to 2.5 times where several are, up to 4.5 where they come and go in each update, and
7 where boundaries are on the disk and little is alive beside gradients: there no heap is kept. Without that cache, as the
command starts itself (seqpart/launch), 1.0 to 1.4 times were seen, and 1.9 where 31 MB were alive; and up to 2.0 where nearly
as many bytes of gradients are made in a backward pass as activations are freed, in other sizes: 1.18 times the sum of live
bytes and those that replace others. See benchmarks/LOG.md.
The heap is made larger than that from the beginning, where the limit has room for it: then the prediction holds whatever the
holes are. A smaller one is tried too, and one as large as the limit allows. Should it grow beyond that until memory runs
out, the run goes on without it. Tensors aligned for huge pages would double the holes: THP_MEM_ALLOC_ENABLE, which is off by
default.
"""

import ctypes
import mmap
import os
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from seqpart.errors import OptionError

_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = 1, -1, -3, -4, -8
_MMAP_THRESHOLD = 65536
_OWN = {
    _M_MMAP_THRESHOLD: ("mmap_threshold", 32 << 20), _M_TRIM_THRESHOLD: ("trim_threshold", 64 << 20),
    _M_MMAP_MAX: ("mmap_max", 1 << 16), _M_MXFAST: ("mxfast", 128), _M_ARENA_MAX: ("arena_max", 8 * (os.cpu_count() or 1)),
}  # fmt: skip
"""{setting that a run changes: (glibc's name, glibc's value)}. Settings cannot be read, and the two thresholds grow with what
is freed until they are set: to these values, after tensors of 32 MB were freed."""
_TRIM_THRESHOLD = 1 << 20
"""Bytes that may be free at the heap's end: with 128 KiB, glibc's initial value, streaming took 7 % more pages."""
RETURNED_FROM = _MMAP_THRESHOLD - 112
"""Tensors of at least this many bytes are mappings of their own: 112 bytes are the header and our alignment."""
_MOST_MAPPINGS = 1 << 30
_SMALL, _MOST_SMALL = 4096, 1 << 15
"""After `map_small`: bytes from which a tensor is a mapping of its own, and the most of these. Linux allows 65,530."""
_HOLES = 16 << 20
"""Bytes of holes that a run may make in the heap: the slack of device/limit.py."""
_FOR_ONE, _FOR_SEVERAL, _STREAMED, _LEAST_FOR_ONE = 2, 3, 5, 1.5
_LEAST_WITHOUT_CACHE, _MORE = 1.4, 16 << 20
"""Heap without the cache: the least factor for one partition, and the most bytes added to 1.5 times the live bytes."""
_CACHED, _IN_CACHE = 1000, 16
"""Bytes of a piece that goes into glibc's cache, and a number of pieces beyond the 7 of one size that it holds."""
_PIECE = 64 << 10
_PROBE = 4 << 20
_PROBED, _PROBES = 64 << 20, 3
"""Bytes that are allocated, and not touched, to see which allocator serves them; and the number of attempts."""
_SIZE_FIELD, _IS_MAPPING = ctypes.sizeof(ctypes.c_size_t), 2
"""glibc's size of a piece lies so many bytes in front of it, with this bit set if the piece is a mapping of its own."""
COMPUTING_SHARE = 0.7
"""Ratio of compute time with a kept heap to that without, if no trial measured it (profile/trials.py)."""


def heap_for(alive: int, replaced: int = 0, *, several: bool, streamed: bool = False) -> int:
    """Bytes of a kept heap for tensors with `alive` bytes at once, of one partition or of `several`.

    replaced: most bytes of gradients that are made while saved activations are freed, or of the latter if they are fewer.
    streamed: True if partitions come and go in each update, or may.
    """
    least = least_heap_for(alive, replaced, several=several, streamed=streamed)
    if several or streamed:
        return least
    return max(least, _with_holes(alive) if pieces_join() else alive * _FOR_ONE)


def least_heap_for(alive: int, replaced: int = 0, *, several: bool, streamed: bool = False) -> int:
    """Least bytes of a kept heap, for a limit without room for `heap_for`."""
    if several or streamed:
        found = _with_holes(alive) if pieces_join() else alive * (_STREAMED if streamed else _FOR_SEVERAL)
    else:
        found = int(alive * (_LEAST_WITHOUT_CACHE if pieces_join() else _LEAST_FOR_ONE))
    return max(found, (alive + replaced) * 6 // 5)


def _with_holes(alive: int) -> int:
    """Bytes of a kept heap, with its holes, without glibc's cache."""
    return alive * 3 // 2 + min(alive // 2, _MORE)


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p),
    )  # fmt: skip


class _Allocated(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ["arena", "ordblks", "smblks", "hblks", "mapped", "usmblks", "fsmblks", "in_use", "free", "keepcost"]
    )


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    return library


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = _declared(ctypes.CDLL("libc.so.6"))
    except OSError:
        return None
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Allocated
    return libc


_libc = _glibc()


@cache
def other_allocator() -> str | None:
    """Returns the file of a library that allocates in place of glibc, for example by LD_PRELOAD; None if there is none.

    A library that counts allocations and passes them on to glibc, as memory profilers do, does not count.
    """
    if _libc is None or not hasattr(_libc, "mallinfo2"):
        return None
    used = _declared(ctypes.CDLL(None))
    for _ in range(_PROBES):
        before = _libc.mallinfo2()
        pointer = used.malloc(_PROBED)
        after = _libc.mallinfo2()
        used.free(pointer)
        # Half of it, and more than once: meanwhile another thread may free some.
        if pointer is None or after.in_use + after.mapped > before.in_use + before.mapped + _PROBED // 2:
            return None
    found = _Symbol()
    _libc.dladdr(ctypes.cast(used.malloc, ctypes.c_void_p), ctypes.byref(found))
    return os.fsdecode(found.file or b"a library that is not named")


@cache
def pieces_join() -> bool:
    """True if small freed pieces join free memory beside them, and are not cached for small objects."""
    if _libc is None or not hasattr(_libc, "mallinfo2"):
        return False
    pieces = [_libc.malloc(_CACHED) for _ in range(_IN_CACHE)]  # what was in the cache is not any more
    before = _libc.mallinfo2().in_use
    for piece in pieces:
        _libc.free(piece)
    return bool(_libc.mallinfo2().in_use < before - (_IN_CACHE - 1) * _CACHED)


def _given(name: str, own: int) -> int:
    """Value of glibc's setting `name` from the environment, as a tunable or a variable; otherwise `own`."""
    words = os.environ.get("GLIBC_TUNABLES", "").split(":") + [f"{key}={value}" for key, value in os.environ.items()]
    found = (re.fullmatch(rf"(?:glibc\.malloc\.{name}|MALLOC_{name.upper()}_?)=(\d+)", word) for word in words)
    return next((int(one[1]) for one in found if one), own)


class Heap:
    """The C library's heap, one per process. Without glibc its methods do nothing: the meter still holds the limit."""

    can_be_kept = _libc is not None

    def __init__(self) -> None:
        self._kept = self._maps_small = False
        self._free = 0
        """Free bytes on the heap when the run began."""

    @contextmanager
    def returned(self) -> Iterator[None]:
        """A context in which freed memory leaves the process at once: by default glibc keeps 225-290 MB of it. After it glibc
        has its own settings again, or the environment's; but its thresholds no longer move, and there is still one arena if
        glibc has counted its arenas meanwhile.

        Raises OptionError where the process has another allocator: the memory that it keeps cannot be predicted.
        """
        if (other := other_allocator()) is not None:
            raise OptionError(
                f"expected the C library's own allocator, found that of {other}: how much free memory it keeps cannot be "
                "predicted, so no limit on CPU would hold. Start without it (env -u LD_PRELOAD ...)."
            )
        pieces: list[int] = []
        self._maps_small = False
        try:
            self._return_memory()
            if not self._kept:
                _fill_holes(pieces)
            self._free = _free()
            yield
        finally:
            if _libc is not None:
                for piece in pieces:
                    _libc.free(piece)
                for setting, (name, own) in _OWN.items():
                    _libc.mallopt(setting, _given(name, own))

    def _return_memory(self) -> None:
        if _libc is not None:
            _libc.mallopt(_M_MMAP_THRESHOLD, _SMALL if self._maps_small else _MMAP_THRESHOLD)
            _libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
            _libc.mallopt(_M_MMAP_MAX, _MOST_SMALL if self._maps_small else _MOST_MAPPINGS)
            _libc.mallopt(_M_ARENA_MAX, 1)
            if pieces_join():
                _libc.mallopt(_M_MXFAST, 0)  # another cache

    def map_small(self) -> bool:
        """Lets small tensors, too, leave the process at once for the rest of the run, if the heap is full of holes that they
        have left. Returns True if it was.

        100 steps of 49 KB between nodes of their graph left holes of 25 MB for each 10 MB, into which none of that size fitted.
        """
        if self._kept or self._maps_small or pieces_join() or _free() < self._free + _HOLES:
            return False
        self._maps_small = True
        self._return_memory()
        return True

    def trim(self) -> None:
        """Returns free memory to the system, unless the heap is kept."""
        if _libc is not None and not self._kept:
            _libc.malloc_trim(0)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which allocations that do not fit into a kept heap are mappings, which leave the process when freed.

        For work beside the blocks', which would enlarge the heap for good."""
        kept = self._kept
        if _libc is not None and kept:
            _libc.mallopt(_M_MMAP_MAX, _MOST_MAPPINGS)
        try:
            yield
        finally:
            if _libc is not None and kept:
                _libc.mallopt(_M_MMAP_MAX, 0)

    @contextmanager
    def kept(self, nbytes: int) -> Iterator[None]:
        """A context with a kept heap of `nbytes` from the beginning; with 0 bytes none is kept."""
        if _libc is None or not nbytes:
            yield
            return
        self._kept = True
        _libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        _libc.mallopt(_M_MMAP_MAX, 0)
        try:
            _touch(_libc, nbytes)
            yield
        finally:
            self._kept = False
            self._return_memory()
            self.trim()


def _free() -> int:
    """Free bytes on the heap."""
    return int(_libc.mallinfo2().free) if _libc is not None and hasattr(_libc, "mallinfo2") else 0


def _fill_holes(pieces: list[int]) -> None:
    """Allocates into `pieces` the free memory of a trimmed heap that a tensor would fit into, and does not touch it.

    A tensor that lay in such a hole would stay in memory when it is freed: where the program had used much memory before, each
    block of a network took another one, and the limit was passed.
    """
    size = left = _free()
    while _libc is not None and left >= _MMAP_THRESHOLD:
        size = min(size, left)
        piece = _libc.malloc(size)
        if piece is not None and not ctypes.c_size_t.from_address(piece - _SIZE_FIELD).value & _IS_MAPPING:
            pieces.append(piece)
            left -= size
            continue
        _libc.free(piece)  # there is no hole of that size
        if size == _MMAP_THRESHOLD:
            return
        size = max(size * 9 // 10, _MMAP_THRESHOLD)


def _touch(libc: ctypes.CDLL, nbytes: int) -> None:
    """Fills the heap's holes and enlarges it after them, with adjacent pieces that join when they are freed.

    Raises MemoryError where the limit has no room for it.
    """
    pieces = (ctypes.c_void_p * (nbytes // _PIECE))()
    try:
        for number in range(len(pieces)):
            piece = pieces[number] = libc.malloc(_PIECE)
            if not piece:
                raise MemoryError(f"no room for a heap of {nbytes} bytes")
            ctypes.memset(piece, 1, _PIECE)
    finally:
        for piece in pieces:
            libc.free(piece)


def page_faults() -> int:
    """Number of this thread's page faults so far: threads that compute together wait for theirs at the same time."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@cache
def seconds_per_fault() -> float:
    """Seconds of one page fault, with its share of a mapping: the time that a kept heap saves.

    Seconds without those of the computing thread's faults were 0.48 (convolution), 0.67 (LSTM), 0.83 (wide linear layer) of
    all; computing with a kept heap took 0.46, 0.66 and 0.87.
    """
    nbytes, best = _PROBE, float("inf")
    for _ in range(3):
        began = time.perf_counter()
        with mmap.mmap(-1, nbytes) as memory:
            place = (ctypes.c_char * nbytes).from_buffer(memory)
            ctypes.memset(place, 1, nbytes)
            again = time.perf_counter()
            ctypes.memset(place, 2, nbytes)
            ended = time.perf_counter()
            del place
        best = min(best, (again - began) - (ended - again))
    return max(0.0, best) / (nbytes // mmap.PAGESIZE)
