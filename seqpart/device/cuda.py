"""A GPU of CUDA, or of ROCm, whose PyTorch has the same names: streams of copies beside the one that computes, pinned host
memory, the caching allocator and its cap.

Work is issued from several threads to three streams: the current one, which computes, and one for copies each way. All memory
of the device is allocated on the first of them; copies on another stream must wait for events, or `lend` the tensor.

A pinned buffer that is dropped while a copy of it is under way is not handed out again before that is over: PyTorch's allocator
of pinned memory notes the stream of every copy that `copy_` and `to` issue, also of a part of the buffer. Code that keeps the
buffer and writes into it again has to wait for an event.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from seqpart.device.accelerator import Accelerator
from seqpart.device.device import DOWN, UP, Event, keyed_seed
from seqpart.device.pages import round_up
from seqpart.units import format_size


class CudaDevice(Accelerator):
    kind = "cuda"

    def __init__(self, index: int) -> None:
        super().__init__()
        self.torch = torch.device("cuda", index)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(self.torch)
        self._share = torch.cuda.get_per_process_memory_fraction(self.torch)
        """Share of the card that the program allows itself: no cap of ours is larger, and it is restored."""
        self._copies = {way: torch.cuda.Stream(self.torch) for way in (UP, DOWN)}  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.torch)  # the context is made here, so that NVML knows this process from the start

    @contextmanager
    def settled(self) -> Iterator[None]:
        # The library picks cuDNN plans by the memory that is free on the real card: a plan made for 80 GB
        # breaks a 2 GB limit, so no benchmarking. See PyTorch issue 69688.
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch)

    def total_memory(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch).total_memory)

    def free_memory(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch)[0])

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch)

    def host(self, nbytes: int) -> torch.Tensor:
        # Whole pages, or a file that is read or written around the page cache falls back to it. The pinned allocator makes
        # powers of two of them anyway: few buffers, allocated once.
        return torch.empty(round_up(nbytes), dtype=torch.uint8, pin_memory=True)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        # Allocated and read on the current stream: no record_stream needed. The host side rests until mark()'s event.
        return host.to(self.torch, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def lend(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.torch))

    def mark(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch))
        return event

    def after(self, event: Event) -> None:
        if event is not None:
            torch.cuda.current_stream(self.torch).wait_event(event)

    def wait(self, event: Event) -> None:
        if event is not None:
            with torch.cuda.device(self.torch):  # of a new thread it is the first GPU, where waiting would make a context
                event.synchronize()

    def is_over(self, event: Event) -> bool:
        return event is None or bool(event.query())

    @contextmanager
    def copying(self, way: str) -> Iterator[None]:
        with torch.cuda.device(self.torch), torch.cuda.stream(self._copies[way]):
            yield

    def at_work(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.torch)

    def _generators(self) -> list[int]:
        return [self.torch.index]

    def seed(self, *key: int | str) -> None:
        super().seed(*key)
        torch.cuda.default_generators[self.torch.index].manual_seed(keyed_seed(*key))

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def allocator_peak(self) -> int | None:
        return int(torch.cuda.max_memory_reserved(self.torch))

    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self.torch))

    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self.torch))

    def allocated_peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.torch))

    def restart_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch)

    def cap(self, nbytes: int | None) -> None:
        share = self._share if nbytes is None else min(self._share, nbytes / self.total_memory())
        torch.cuda.set_per_process_memory_fraction(share, self.torch)


GRANULE = 512
_SMALL = 1 << 20
_SMALL_SEGMENT, _MEDIUM, _MEDIUM_SEGMENT = 2 << 20, 10 << 20, 20 << 20


@dataclass(slots=True)
class _Block:
    segment: int
    start: int
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
                self._join(order, min(at, other), max(at, other))
                at = min(at, other)

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
        number = self._new(_Block(self._next, 0, want, small))
        self._segments[self._blocks[number].segment] = [number]
        return number

    def _new(self, block: _Block) -> int:
        number, self._next = self._next, self._next + 1
        self._blocks[number] = block
        return number

    def _split(self, number: int, block: _Block, size: int) -> None:
        rest = self._new(_Block(block.segment, block.start + size, block.size - size, block.small))
        block.size = size
        order = self._segments[block.segment]
        order.insert(order.index(number) + 1, rest)

    def _join(self, order: list[int], first: int, second: int) -> None:
        gone = self._blocks.pop(order.pop(second))
        self._blocks[order[first]].size += gone.size
