"""What computes asks for memory, copies and events here, whatever the device is; and the CPU, the simplest of them.

On CPU the device is this process's own anonymous memory: uploads are no copies, events are None. Elsewhere work is issued to
streams and done later, each stream's in its order. `mark` says when the current stream is through, `after` lets the current
stream wait for that on the device, and `wait` blocks the calling thread, which only memory of the host needs.
"""

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import psutil
import torch

from seqpart.device import cgroups
from seqpart.device.card import Hardware
from seqpart.device.gpu_tables import release_gpu_tables
from seqpart.device.heap import RETURNED_FROM, Heap
from seqpart.device.pages import aligned
from seqpart.device.process_limits import files_and_threads, in_run, room, room_left

_ALLOCATION_FAILED = (
    "DefaultCPUAllocator: can't allocate memory", "std::bad_alloc", "Cannot allocate memory", "can't start new thread",
    "_STATUS_ALLOC_FAILED", "_ALLOCATION_FAILED", "CUDA error: out of memory", "HIP error: out of memory",
    "was unable to find an engine to execute this computation",
)  # fmt: skip
"""The last: cuDNN's plans are tried one after the other, and each that gets no workspace is passed over in silence."""
_ONEDNN_FAILED = re.compile(r"could not (create|execute) a (primitive(?! desc)|memory|stream|engine)")
"""oneDNN does not say why: a kernel's code and its scratchpad are memory. What it cannot do at all fails by its descriptor."""


Event = Any
"""Of a stream: what `Device.mark` gives. None where nothing runs behind our back."""
UP, DOWN = "up", "down"
"""Streams of copies: from the host to the device, and home."""


class Device:
    """The CPU; also the interface that other devices keep."""

    kind = "cpu"
    shares_memory = True
    """Whether its memory is this process's own: then host buffers count against the limit."""
    host_tier = "ram"
    granule = 1
    """The allocator rounds every tensor up to a multiple of this many bytes."""
    heap_below = RETURNED_FROM
    """Tensors under this many bytes lie on the C library's heap, unless the plan keeps that."""
    growth = 12 << 20
    """Allowed for packing buffers inside matrix kernels, small objects and the allocator's own; benchmarks/prediction.py."""

    hardware: Hardware | None = None
    """Of a device that is simulated: what is measured on others."""
    contention = 0.15
    """Seconds that the computation loses to a second of transfers behind it: they share the memory and the processor."""

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.heap = Heap()

    @property
    def keeps_heap(self) -> bool:
        """Whether a plan may keep memory that is free, for tensors to come."""
        return self.kind == "cpu" and self.heap.can_be_kept

    @property
    def name(self) -> str:
        return f"CPU, {torch.get_num_threads()} threads"

    def total_memory(self) -> int:
        return min(int(psutil.virtual_memory().total), cgroups.limit(), room())

    def free_memory(self) -> int:
        # Stacks and arenas of threads that are yet to begin are reserved of what the process may have.
        return min(int(psutil.virtual_memory().available), cgroups.free(), room_left() * 7 // 8)

    def used(self) -> int:
        """Bytes of it that this process has, where nobody else can say that."""
        return 0

    def running(self) -> AbstractContextManager[None]:
        """Around a run, from its plan to its proof: what it needs of the process, which is as it was when the last run ends.

        Raises OptionError where another thread is in a run, or the process may not do what one needs.
        """
        return in_run(self.kind, self._changes)

    @contextmanager
    def _changes(self) -> Iterator[None]:
        with files_and_threads(torch.get_num_threads() - 1), self.settled():
            yield

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Inside, freed memory leaves the process at once. What only a GPU would need leaves it for good."""
        with self.heap.returned():
            release_gpu_tables()
            yield

    def empty(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 buffer on the device, page-aligned, owned by the caller."""
        return aligned(nbytes)

    def host(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 buffer of whole pages, `nbytes` or a little more, from which `upload` is fast."""
        return aligned(nbytes)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """`host` on the device. On CPU the same memory, so it must rest until the step that uses it is over."""
        return host

    def own(self, host: torch.Tensor) -> torch.Tensor:
        """`host` on the device, in memory of its own."""
        return host.clone()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in host memory, where it may be read at once."""
        return tensor

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether the processor may read and write it."""
        return True

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Between the host and the device, alike in shape and type, on the current stream: both rest until `mark`'s event."""
        target.copy_(source, non_blocking=True)

    def lend(self, tensor: torch.Tensor) -> None:
        """The current stream uses `tensor`, of the device: its memory is nobody else's before that is over."""

    def mark(self) -> Event:
        """An event behind everything that was issued to the current stream so far."""
        return None

    def after(self, event: Event) -> None:
        """What is issued to the current stream from now on begins behind `event`."""

    def wait(self, event: Event) -> None:
        """Block the calling thread until `event` has happened."""

    def is_over(self, event: Event) -> bool:
        """Whether `event` has happened, without waiting for it."""
        return True

    def copying(self, way: str) -> AbstractContextManager[object]:
        """Inside, the current stream is that of copies `UP` or `DOWN`, which does not wait for the computation."""
        return nullcontext()

    def at_work(self) -> AbstractContextManager[object]:
        """Around everything that a thread does with it."""
        return nullcontext()

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        """Mixed precision for one block. Without the cache of casts: a shared weight's gradients add up as float32."""
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.torch.type, dtype=dtype, cache_enabled=False)

    def seed(self, *key: int | str) -> None:
        """Random state as a function of place (run seed, step, block, micro-batch), never of call order."""
        torch.default_generator.manual_seed(keyed_seed(*key))

    @contextmanager
    def own_random_state(self) -> Iterator[None]:
        """Inside, random numbers are ours, and gradients are on; outside, the caller's go on as if nothing had been drawn."""
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=self._generators()):
            yield

    def _generators(self) -> list[int]:
        """Numbers of the GPUs whose random state is ours too."""
        return []

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether memory, or the room for a thread's stack, was refused."""
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, OSError):  # mmap and fork
            return error.errno == errno.ENOMEM
        # The CPU allocator, oneDNN and CUDA's libraries have no exception type of their own: texts are matched, here only.
        found = str(error) if isinstance(error, RuntimeError) else ""
        return any(text in found for text in _ALLOCATION_FAILED) or _ONEDNN_FAILED.search(found) is not None

    def release_cached(self) -> None:
        """Give memory that the allocator keeps for reuse back to the system."""
        self.heap.trim()

    # --- its own memory, where that is not the process's -----------------------------------------------------------

    def reserved(self) -> int:
        """Bytes that the framework's allocator has of the device."""
        return 0

    def allocated(self) -> int:
        """Bytes of tensors in them."""
        return 0

    def allocated_peak(self) -> int:
        """The most of these since `restart_peaks`."""
        return 0

    def restart_peaks(self) -> None:
        """From now on `allocated_peak` and `allocator_peak` count anew."""

    def cap(self, nbytes: int | None) -> None:
        """Let the allocator have at most so many bytes; None: all of the device."""

    def allocator_peak(self) -> int | None:
        """Most bytes that the framework's allocator held at once, where it counts them."""
        return None


def keyed_seed(*key: int | str) -> int:
    """63 bits from `key`: the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def host_memory_free() -> int:
    """RAM that this process may still take: what the system and the cgroup leave."""
    return Device().free_memory()


def describe_versions() -> dict[str, str]:
    import platform

    return {
        "seqpart": _version("seqpart"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": f"{os.cpu_count()} CPUs, {psutil.virtual_memory().total / 1e9:.1f} GB RAM",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
