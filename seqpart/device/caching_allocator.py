"""A model of PyTorch's caching allocator, in numbers only: segments taken from the device, and their blocks for tensors.

As in c10/cuda/CUDACachingAllocator.cpp with its default settings: requests are rounded to 512 bytes; up to 1 MiB they share
segments of 2 MiB, up to 10 MiB segments of 20 MiB, and larger ones have a segment of their own, rounded to 2 MiB; the smallest
free block that suffices is taken, and split where enough is left; free neighbours are joined; free segments are returned only
when the device has no more.
"""

from dataclasses import dataclass

import torch

from seqpart.device.pages import round_up
from seqpart.units import format_size

GRANULE = 512
_SMALL = 1 << 20
_SMALL_SEGMENT, _MEDIUM, _MEDIUM_SEGMENT = 2 << 20, 10 << 20, 20 << 20


@dataclass(slots=True, eq=False)
class Block:
    size: int
    small: bool
    segment: "list[Block]"
    """All blocks of its segment, in order of address."""
    free: bool = True


class CachingAllocator:
    """capacity: bytes of the device that segments may take."""

    def __init__(self, capacity: int) -> None:
        self.capacity = self._cap = capacity
        self.reserved = self.allocated = self.reserved_peak = self.allocated_peak = 0
        self._segments: list[list[Block]] = []

    def cap(self, nbytes: int | None) -> None:
        """Limits segments to `nbytes` from now on; None: the whole capacity."""
        self._cap = self.capacity if nbytes is None else min(nbytes, self.capacity)

    def restart_peaks(self) -> None:
        self.reserved_peak, self.allocated_peak = self.reserved, self.allocated

    def take(self, nbytes: int) -> Block:
        """Allocates a block of `nbytes`. Raises torch.OutOfMemoryError where the device has no more."""
        size = round_up(max(nbytes, 1), GRANULE)
        small = size <= _SMALL
        blocks = (block for segment in self._segments for block in segment)
        fitting = (block for block in blocks if block.free and block.small is small and block.size >= size)
        found = min(fitting, key=lambda block: block.size, default=None) or self._reserve(size, small)
        found.free = False
        left = found.size - size
        if left >= (GRANULE if small else _SMALL + 1):
            found.segment.insert(found.segment.index(found) + 1, Block(left, small, found.segment))
            found.size = size
        self.allocated += found.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return found

    def give(self, block: Block) -> None:
        """Frees the block; the allocator keeps its memory."""
        block.free = True
        self.allocated -= block.size
        segment = block.segment
        at = segment.index(block)
        for other in (at + 1, at - 1):  # the one after first: then the place of the one before is still right
            if 0 <= other < len(segment) and segment[other].free:
                at = min(at, other)
                segment[at].size += segment.pop(at + 1).size

    def release_cached(self) -> None:
        """Returns free segments to the device."""
        for segment in [one for one in self._segments if len(one) == 1 and one[0].free]:
            self.reserved -= segment[0].size
            self._segments.remove(segment)

    def _reserve(self, size: int, small: bool) -> Block:
        """Takes a segment, which is one free block, from the device."""
        own = _MEDIUM_SEGMENT if size < _MEDIUM else round_up(size, _SMALL_SEGMENT)
        want = _SMALL_SEGMENT if small else own
        if self.reserved + want > self._cap:
            self.release_cached()
        if self.reserved + want > self._cap:
            raise torch.OutOfMemoryError(
                f"out of memory on the simulated device: tried to allocate {format_size(size)}; {format_size(self.allocated)} "
                f"are allocated, {format_size(self.reserved)} reserved, of {format_size(self._cap)} allowed"
            )
        self.reserved += want
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        segment = list[Block]()
        segment.append(Block(want, small, segment))
        self._segments.append(segment)
        return segment[0]
