"""A GPU of CUDA, or of ROCm, whose PyTorch has the same names: streams of copies beside the one that computes, pinned host
memory, the caching allocator and its cap.

Work is issued from several threads to three streams: the current one, which computes, and one for copies each way. All memory
of the device is allocated on the first of them; copies on another stream must wait for events, or `lend` the tensor.

A pinned buffer that is dropped while a copy of it is under way is not handed out again before that is over: PyTorch's allocator
of pinned memory notes the stream of every copy that `copy_` and `to` issue, also of a part of the buffer. Code that keeps the
buffer and writes into it again has to wait for an event.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from seqpart.device.device import DOWN, UP, Accelerator, Event, keyed_seed
from seqpart.device.pages import round_up


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

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        also: Any = torch.utils.deterministic
        fills, also.fill_uninitialized_memory = also.fill_uninitialized_memory, False
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with warnings.catch_warnings():
                # Also of cuBLAS, whose workspace torch fixes for each stream.
                warnings.filterwarnings("ignore", "(.|\n)*determinis", UserWarning)
                yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            also.fill_uninitialized_memory = fills

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

    def restart_peaks(self) -> bool:
        torch.cuda.reset_peak_memory_stats(self.torch)
        return True

    def cap(self, nbytes: int | None) -> None:
        share = self._share if nbytes is None else min(self._share, nbytes / self.total_memory())
        torch.cuda.set_per_process_memory_fraction(share, self.torch)
