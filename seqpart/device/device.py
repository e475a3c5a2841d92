"""The interface of devices for memory, copies and events; and the CPU, the simplest of them.

On CPU the device is this process's own anonymous memory: uploads are no copies, events are None. Elsewhere work is issued to
streams and done later, in order within each stream. `mark` records an event in the current stream, `after` makes the current
stream wait for one on the device, and `wait` blocks the calling thread, which only host memory needs.
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
from seqpart.device.process_limits import files_and_threads, held, highest, in_run, room, room_left, set_mark_back, status_of

_ALLOCATION_FAILED = (
    "DefaultCPUAllocator: can't allocate memory", "std::bad_alloc", "Cannot allocate memory", "can't start new thread",
    "_STATUS_ALLOC_FAILED", "_ALLOCATION_FAILED", "CUDA error: out of memory", "HIP error: out of memory",
    "was unable to find an engine to execute this computation",
)  # fmt: skip
"""Error texts of failed allocations. The last: cuDNN tries its plans in turn, and silently skips those without workspace."""
_ONEDNN_FAILED = re.compile(r"could not (create|execute) a (primitive(?! desc)|memory|stream|engine)")
"""oneDNN's error texts, which name no reason: a kernel's code and scratchpad are memory. An unsupported operation fails by its
descriptor instead."""
_STEP, _FIRST, _SECOND = (factor - (1 << 64) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""SplitMix64's constants, as torch's int64."""


Event = Any
"""An event of a stream, from `Device.mark`; None where nothing runs asynchronously."""
UP, DOWN = "up", "down"
"""Streams of copies: from the host to the device, and back."""


class Device:
    """The CPU; also the interface that other devices keep."""

    kind = "cpu"
    shares_memory = True
    """True if its memory is this process's own: then host buffers count against the limit."""
    host_tier = "ram"
    granule = 1
    """The allocator rounds every tensor up to a multiple of this many bytes."""
    heap_below = RETURNED_FROM
    """Tensors under this many bytes lie on the C library's heap, unless the plan keeps a heap."""
    growth = 12 << 20
    """Bytes allowed for packing buffers of matrix kernels, small objects and the allocator's own; benchmarks/prediction.py."""

    hardware: Hardware | None = None
    """Table of a simulated device's properties; None: they are measured."""
    contention = 0.15
    """Slowdown of the computation, in seconds per second of overlapped transfer: both use the memory and the processor."""

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.heap = Heap()

    @property
    def keeps_heap(self) -> bool:
        """True if a plan may keep freed memory for later tensors."""
        return self.kind == "cpu" and self.heap.can_be_kept

    @property
    def name(self) -> str:
        return f"CPU, {torch.get_num_threads()} threads"

    def total_memory(self) -> int:
        return min(int(psutil.virtual_memory().total), cgroups.limit(), room())

    def free_memory(self) -> int:
        # Stacks and arenas of threads that are yet to start take part of what the process may reserve.
        return min(int(psutil.virtual_memory().available), cgroups.free(), room_left() * 7 // 8)

    def used(self) -> int:
        """Bytes of the device that this process holds, for simulated devices, where no driver says it."""
        return 0

    def running(self) -> AbstractContextManager[None]:
        """A context for a run, from plan to proof: changes what it needs of the process, and undoes that with the last run.

        Raises OptionError where another thread is in a run, or the process may not do what one needs.
        """
        return in_run(self.kind, self._changes)

    @contextmanager
    def _changes(self) -> Iterator[None]:
        with files_and_threads(torch.get_num_threads() - 1), self.settled():
            yield

    @contextmanager
    def settled(self) -> Iterator[None]:
        """A context in which freed memory leaves the process at once. Tables that only a GPU needs leave it for good."""
        with self.heap.returned():
            release_gpu_tables()
            yield

    def deterministic(self) -> AbstractContextManager[None]:
        """A context in which kernels that add in an order of chance are replaced where torch has others."""
        return nullcontext()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Returns a flat uint8 buffer on the device, page-aligned, owned by the caller."""
        return aligned(nbytes)

    def host(self, nbytes: int) -> torch.Tensor:
        """Returns a flat uint8 buffer of whole pages, at least `nbytes`, from which `upload` is fast."""
        return aligned(nbytes)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Returns `host` on the device. On CPU the same memory, so it must not change until the step that uses it is over."""
        return host

    def own(self, host: torch.Tensor) -> torch.Tensor:
        """Returns `host` on the device, in memory of its own."""
        return host.clone()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor` in host memory, where it may be read at once."""
        return tensor

    def is_host(self, tensor: torch.Tensor) -> bool:
        """True if the processor may read and write the tensor."""
        return True

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies between host and device, alike in shape and type, on the current stream; neither may change until an event of
        `mark` after it."""
        target.copy_(source, non_blocking=True)

    def lend(self, tensor: torch.Tensor) -> None:
        """Keeps the memory of `tensor`, of the device, from reuse until the current stream is done with it (record_stream)."""

    def mark(self) -> Event:
        """Returns an event after everything that was issued to the current stream so far."""
        return None

    def after(self, event: Event) -> None:
        """Makes later work of the current stream begin after `event`."""

    def wait(self, event: Event) -> None:
        """Blocks the calling thread until `event` has happened."""

    def is_over(self, event: Event) -> bool:
        """True if `event` has happened. Does not wait."""
        return True

    def copying(self, way: str) -> AbstractContextManager[object]:
        """A context whose current stream is that of copies `UP` or `DOWN`, which does not wait for the computation."""
        return nullcontext()

    def at_work(self) -> AbstractContextManager[object]:
        """A context for all work of a thread with the device."""
        return nullcontext()

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        """A context of mixed precision. Without a cache of casts: a shared weight's gradients add up as float32."""
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.torch.type, dtype=dtype, cache_enabled=False)

    def seed(self, *key: int | str) -> None:
        """Seeds the generators by place (run seed, step, block, micro-batch), so that call order has no effect."""
        torch.default_generator.manual_seed(keyed_seed(*key))

    @contextmanager
    def own_random_state(self) -> Iterator[None]:
        """A context with gradients on, after which the caller's random states are as if nothing had been drawn.

        Inside an autocast of the caller's that goes on for several updates, weights are cast anew for each: that would keep
        casts of the first ones until it ends.
        """
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=self._generators()):
                yield
        finally:
            torch.set_autocast_cache_enabled(caches)

    def _generators(self) -> list[int]:
        """Indexes of the GPUs whose random state is saved too."""
        return []

    def is_out_of_memory(self, error: BaseException) -> bool:
        """True if an allocation failed, or a thread had no room for its stack."""
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, OSError):  # mmap and fork
            return error.errno == errno.ENOMEM
        # The CPU allocator, oneDNN and CUDA's libraries have no exception types of their own: texts are matched, only here.
        found = str(error) if isinstance(error, RuntimeError) else ""
        return any(text in found for text in _ALLOCATION_FAILED) or _ONEDNN_FAILED.search(found) is not None

    def ran_out_of_memory(self, error: BaseException | None) -> bool:
        """True if `error`, or what led to it, is a failed allocation: code of the user's that is called may run out, too."""
        seen = set[int]()  # an error may be its own cause
        while error is not None and id(error) not in seen:
            if self.is_out_of_memory(error):
                return True
            seen.add(id(error))
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return False

    def release_cached(self) -> None:
        """Returns memory that the allocator caches to the system."""
        self.heap.trim()

    # --- its memory in use: on the CPU what the process holds, elsewhere what the framework's allocator does ----------

    def reserved(self) -> int:
        """Bytes of the device that the framework's allocator has reserved."""
        return 0

    def allocated(self) -> int:
        """Bytes held now, of the device by tensors."""
        return held(status_of())

    def allocated_peak(self) -> int:
        """Most bytes held since `restart_peaks`, however briefly."""
        return highest()

    def restart_peaks(self) -> bool:
        """Restarts `allocated_peak` and `allocator_peak`; on the CPU `ru_maxrss` forgets earlier peaks, too.

        Returns False where they are not known: /proc is read-only, or a simulated device has no kernels."""
        return set_mark_back()

    def cap(self, nbytes: int | None) -> None:
        """Limits the allocator to `nbytes`; None: all of the device."""

    def allocator_peak(self) -> int | None:
        """Most bytes that the framework's allocator held at once; None if it does not count them."""
        return None


class Accelerator(Device):
    """A device with its own memory: streams for copies from and to pinned host memory, and a capped caching allocator."""

    shares_memory = False
    contention = 0.0
    host_tier = "pinned"
    granule = 512
    heap_below = 0
    growth = 64 << 20
    """Bytes allowed for kernel workspaces and the caching allocator's fragmentation."""

    @contextmanager
    def settled(self) -> Iterator[None]:
        """A context without effect: the limit caps the device's allocator, not the processor's memory."""
        yield

    def own(self, host: torch.Tensor) -> torch.Tensor:
        return self.upload(host)


def keyed_seed(*key: int | str) -> int:
    """Returns 63 bits from `key`: the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def random_words(places: torch.Tensor, key: int, room: torch.Tensor | None = None) -> torch.Tensor:
    """Turns places, int64, into the random words of 64 bits at these places of the sequence `key` (SplitMix64).

    room: memory of as many numbers to work in.
    """
    places.mul_(_STEP).add_(key)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        places.bitwise_xor_(shifted(places, shift, room)).mul_(factor)
    return places.bitwise_xor_(shifted(places, 31, room))


def shifted(bits: torch.Tensor, by: int, room: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a logical right shift, in `room`, which fills with zeros; torch's own shift fills with the sign."""
    return torch.bitwise_right_shift(bits, by, out=room).bitwise_and_((1 << (64 - by)) - 1)


def host_memory_free() -> int:
    """Bytes of RAM that this process may still take: what the system and the cgroup leave."""
    return Device().free_memory()


def describe_versions() -> dict[str, str]:
    import platform

    return {
        "seqpart": version_of("seqpart"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": f"{os.cpu_count()} CPUs, {psutil.virtual_memory().total / 1e9:.1f} GB RAM",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
