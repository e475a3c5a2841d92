"""Host memory for the fast tier: a few large pieces allocated once, handed out by whole pages.

On CPU one shared anonymous mapping, which the kernel shows as RssShmem, beside the limit and never inside it. On
CUDA pinned pieces of at most 32 GiB in powers of two, because the pinned allocator rounds every request up to one and
never gives it back.
"""

import mmap
import threading
from collections.abc import Sequence

import torch

from seqpart.device.device import Device
from seqpart.device.pages import PAGE, aligned, round_up

_LARGEST_PIECE = 32 << 30  # the state of a large embedding is one buffer
_SMALLEST_PIECE = 1 << 20


class Extents:
    """First-fit allocation of page-rounded ranges in `size` bytes. Ints only."""

    def __init__(self, size: int) -> None:
        self.free = [(0, size)] if size else []

    def take(self, nbytes: int) -> int | None:
        """Offset of a free range of `nbytes`, or None."""
        need = round_up(max(nbytes, 1))
        for index, (start, length) in enumerate(self.free):
            if length >= need:
                self.free[index : index + 1] = [(start + need, length - need)] if length > need else []
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Frees a range; free neighbours are joined."""
        ranges = sorted([*self.free, (start, round_up(max(nbytes, 1)))])
        joined = [ranges[0]]
        for begin, length in ranges[1:]:
            last, size = joined[-1]
            if last + size == begin:
                joined[-1] = (last, size + length)
            else:
                joined.append((begin, length))
        self.free = joined


def piece_sizes(budget: int, *, powers_of_two: bool) -> list[int]:
    """Sizes of the pieces that make up at most `budget` bytes."""
    if not powers_of_two:
        return [budget // PAGE * PAGE] if budget >= PAGE else []
    sizes = []
    while budget >= _SMALLEST_PIECE:
        piece = min(_LARGEST_PIECE, 1 << (budget.bit_length() - 1))
        sizes.append(piece)
        budget -= piece
    return sizes


def first_piece(nbytes: int, *, powers_of_two: bool) -> int:
    return 1 << max(0, nbytes - 1).bit_length() if powers_of_two else round_up(nbytes)


def pieces_for(need: int, groups: Sequence[Sequence[int]], budget: int, *, powers_of_two: bool) -> tuple[int, frozenset[int]]:
    """Returns (bytes of a pool within `budget` for `need` bytes, numbers of the groups of buffers that fit in it, in order).

    With powers of two the pool may have to be larger than `need`, so that the last group fits.
    """
    sizes, fit = list[int](), frozenset[int]()
    for parts in (64, 65, 66, 68, 72, 80, 96, 128) if powers_of_two else (64,):
        wanted = round_up(need * parts // 64, _SMALLEST_PIECE if powers_of_two else PAGE)
        sizes = piece_sizes(min(budget, wanted), powers_of_two=powers_of_two)
        fit = _fitting([Extents(size) for size in sizes], groups)
        if len(fit) == len(groups):
            break
    return sum(sizes), fit


def _fitting(pieces: Sequence[Extents], groups: Sequence[Sequence[int]]) -> frozenset[int]:
    fit = set()
    for number, group in enumerate(groups):
        taken: list[tuple[Extents, int, int]] = []
        for nbytes in group:
            place = next(((piece, start, nbytes) for piece in pieces if (start := piece.take(nbytes)) is not None), None)
            if place is None:
                break
            taken.append(place)
        if len(taken) == len(group):
            fit.add(number)
        else:
            for piece, start, nbytes in taken:
                piece.give(start, nbytes)
    return frozenset(fit)


class HostPool:
    """A pool that hands out flat uint8 buffers within `budget` bytes (`take`, `give`); `take` returns None if none fits.

    first: bytes of a separate piece, within the budget, which is handed out first.
    """

    def __init__(self, budget: int, device: Device, *, first: int = 0) -> None:
        pinned = not device.shares_memory
        sizes = [first] * bool(first) + piece_sizes(budget - first, powers_of_two=pinned)
        self._pieces = [device.host(size) if pinned else _shared(size) for size in sizes]
        self._extents = [Extents(size) for size in sizes]
        self._taken: dict[int, tuple[int, int, int]] = {}
        self._lock = threading.Lock()  # the store's threads place new homes at the same time
        self.size = sum(sizes)

    def take(self, nbytes: int) -> torch.Tensor | None:
        with self._lock:
            for index, extents in enumerate(self._extents):
                start = extents.take(nbytes)
                if start is not None:
                    flat = self._pieces[index][start : start + round_up(max(nbytes, 1))]
                    self._taken[flat.data_ptr()] = (index, start, nbytes)
                    return flat
        return None

    def give(self, flat: torch.Tensor) -> None:
        with self._lock:
            index, start, nbytes = self._taken.pop(flat.data_ptr())
            self._extents[index].give(start, nbytes)


class OwnMemory:
    """Planned memory under the limit, with a mapping of its own for each buffer."""

    def take(self, nbytes: int) -> torch.Tensor | None:
        return aligned(nbytes)

    def give(self, flat: torch.Tensor) -> None:
        """Does nothing: the buffer is freed with its last reference."""


def _shared(size: int) -> torch.Tensor:
    # The tensor keeps the mapping alive; its pages are touched, and counted, only when used.
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
