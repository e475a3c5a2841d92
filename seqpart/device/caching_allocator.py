"""A model of PyTorch's caching allocator, in numbers only: segments taken from the device, and their blocks for tensors.

As in c10/cuda/CUDACachingAllocator.cpp with its default settings: requests are rounded to 512 bytes; up to 1 MiB they share
segments of 2 MiB, up to 10 MiB segments of 20 MiB, and larger ones have a segment of their own, rounded to 2 MiB; the smallest
free block that suffices is taken, and split where enough is left; free neighbours are joined; free segments are returned only
when the device has no more.
"""

from dataclasses import dataclass

import torch

from seqpart.units import format_size

GRANULE = 512
_SMALL = 1 << 20
_SMALL_SEGMENT, _MEDIUM, _MEDIUM_SEGMENT = 2 << 20, 10 << 20, 20 << 20


@dataclass(slots=True)
class _Block:
    segment: int
    size: int
    small: bool
    free: bool = True


class CachingAllocator:
    """Allocates blocks, identified by number. capacity: bytes of the device that segments may take."""

    def __init__(self, capacity: int) -> None:
        self.capacity = self._cap = capacity
        self.reserved = self.allocated = self.reserved_peak = self.allocated_peak = 0
        self._segments: dict[int, list[int]] = {}
        """{segment: numbers of its blocks, in order of address}."""
        self._blocks: dict[int, _Block] = {}
        self._next = 0

    def cap(self, nbytes: int | None) -> None:
        """Limits segments to `nbytes` from now on; None: the whole capacity."""
        self._cap = self.capacity if nbytes is None else min(nbytes, self.capacity)

    def restart_peaks(self) -> None:
        self.reserved_peak, self.allocated_peak = self.reserved, self.allocated

    def take(self, nbytes: int) -> int:
        """Allocates a block of `nbytes` and returns its number. Raises torch.OutOfMemoryError where the device has no more."""
        size = -(-max(nbytes, 1) // GRANULE) * GRANULE
        small = size <= _SMALL
        found = self._fitting(size, small)
        if found is None:
            found = self._reserve(size, small)
        block = self._blocks[found]
        block.free = False
        left = block.size - size
        if left >= (GRANULE if small else _SMALL + 1):
            self._split(found, block, size)
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return found

    def give(self, number: int) -> None:
        """Frees the block; the allocator keeps its memory."""
        block = self._blocks[number]
        block.free = True
        self.allocated -= block.size
        order = self._segments[block.segment]
        at = order.index(number)
        for other in (at + 1, at - 1):  # the one after first: then the place of the one before is still right
            if 0 <= other < len(order) and self._blocks[order[other]].free:
                at = min(at, other)
                self._blocks[order[at]].size += self._blocks.pop(order.pop(at + 1)).size

    def release_cached(self) -> None:
        """Returns free segments to the device."""
        for segment, order in list(self._segments.items()):
            if len(order) == 1 and self._blocks[order[0]].free:
                self.reserved -= self._blocks.pop(order[0]).size
                del self._segments[segment]

    def _fitting(self, size: int, small: bool) -> int | None:
        fitting = [
            (block.size, number)
            for number, block in self._blocks.items()
            if block.free and block.small is small and block.size >= size
        ]
        return min(fitting)[1] if fitting else None

    def _reserve(self, size: int, small: bool) -> int:
        if small:
            want = _SMALL_SEGMENT
        elif size < _MEDIUM:
            want = _MEDIUM_SEGMENT
        else:
            want = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        if self.reserved + want > self._cap:
            self.release_cached()
        if self.reserved + want > self._cap:
            raise torch.OutOfMemoryError(
                f"out of memory on the simulated device: tried to allocate {format_size(size)}; {format_size(self.allocated)} "
                f"are allocated, {format_size(self.reserved)} reserved, of {format_size(self._cap)} allowed"
            )
        self.reserved += want
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        number = self._new(_Block(self._next, want, small))
        self._segments[self._blocks[number].segment] = [number]
        return number

    def _new(self, block: _Block) -> int:
        number, self._next = self._next, self._next + 1
        self._blocks[number] = block
        return number

    def _split(self, number: int, block: _Block, size: int) -> None:
        rest = self._new(_Block(block.segment, block.size - size, block.small))
        block.size = size
        order = self._segments[block.segment]
        order.insert(order.index(number) + 1, rest)
