"""CPU and CUDA behind the same calls: what computes asks for memory, copies and events here, whatever the device is.

On CPU the device is this process's own anonymous memory: uploads are no copies, events are None. On CUDA uploads go
from pinned memory on the current stream, and an event says when the host buffer may be reused.
"""

import errno
import hashlib
import os
import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import psutil
import torch

from seqpart.errors import OptionError
from seqpart.files.direct import aligned
from seqpart.memory.gpu_tables import release_gpu_tables
from seqpart.memory.heap import RETURNED_FROM, Heap

_ALLOCATION_FAILED = (
    "DefaultCPUAllocator: can't allocate memory", "std::bad_alloc", "Cannot allocate memory", "can't start new thread",
    "_STATUS_ALLOC_FAILED", "CUDA error: out of memory",
)  # fmt: skip
_ONEDNN_FAILED = re.compile(r"could not (create|execute) a (primitive(?! desc)|memory|stream|engine)")
"""oneDNN does not say why: a kernel's code and its scratchpad are memory. What it cannot do at all fails by its descriptor."""


class Device:
    """The CPU; also the interface that CUDA keeps."""

    kind = "cpu"
    host_tier = "ram"
    granule = 1
    """The allocator rounds every tensor up to a multiple of this many bytes."""
    heap_below = RETURNED_FROM
    """Tensors under this many bytes lie on the C library's heap, unless the plan keeps that."""
    growth = 12 << 20
    """Allowed for packing buffers inside matrix kernels, small objects and the allocator's own; benchmarks/prediction.py."""

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
        return min(int(psutil.virtual_memory().total), _cgroup_limit())

    def free_memory(self) -> int:
        return min(int(psutil.virtual_memory().available), _cgroup_free())

    def settle(self) -> None:
        """Make freed memory leave the process at once, and put down what only a GPU would need."""
        self.heap.settle()
        release_gpu_tables()

    def empty(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 buffer on the device, page-aligned, owned by the caller."""
        return aligned(nbytes)

    def host(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 buffer from which `upload` is fast."""
        return aligned(nbytes)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """`host` on the device. On CPU the same memory, so it must rest until the step that uses it is over."""
        return host

    def own(self, host: torch.Tensor) -> torch.Tensor:
        """`host` on the device, in memory of its own."""
        return host.clone()

    def mark(self) -> torch.cuda.Event | None:
        """An event behind everything issued so far; None where nothing runs behind our back."""
        return None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Block the calling thread until `event` has happened."""

    def copying(self) -> AbstractContextManager[object]:
        """Around copies in an I/O thread: they do not wait for the computation, and are over when it ends."""
        return nullcontext()

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        """Mixed precision for one block. Without the cache of casts: a shared weight's gradients add up as float32."""
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.kind, dtype=dtype, cache_enabled=False)

    def seed(self, *key: int | str) -> None:
        """Random state as a function of place (run seed, step, block, micro-batch), never of call order."""
        torch.default_generator.manual_seed(keyed_seed(*key))

    def own_random_state(self) -> AbstractContextManager[None]:
        """Inside, random numbers are ours; outside, the caller's go on as if nothing had been drawn."""
        return torch.random.fork_rng(devices=[] if self.kind == "cpu" else [self.torch.index])

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

    def allocator_peak(self) -> int | None:
        """Most bytes that the framework's allocator held at once, where it counts them."""
        return None


class CudaDevice(Device):
    kind = "cuda"
    contention = 0.0
    host_tier = "pinned"
    granule = 512
    heap_below = 0
    growth = 64 << 20
    """Kernel workspaces, and what the caching allocator loses to fragments."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.torch = torch.device("cuda", index)
        self._threads = threading.local()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(self.torch)
        # The library picks cuDNN plans by the memory that is free on the real card: a plan made for 80 GB
        # breaks a 2 GB limit, so no benchmarking. See PyTorch issue 69688.
        torch.backends.cudnn.benchmark = False
        torch.cuda.synchronize(self.torch)  # the context is made here, so that NVML knows this process from the start

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch)

    def total_memory(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch).total_memory)

    def free_memory(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch)[0])

    def settle(self) -> None:
        """The caching allocator is capped by the meter; nothing to settle here."""

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch)

    def host(self, nbytes: int) -> torch.Tensor:
        # Rounded to a power of two by the pinned allocator anyway: few buffers, allocated once.
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        # Allocated and read on the current stream: no record_stream needed. The host side rests until mark()'s event.
        return host.to(self.torch, non_blocking=True)

    def own(self, host: torch.Tensor) -> torch.Tensor:
        return self.upload(host)

    def mark(self) -> torch.cuda.Event | None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch))
        return event

    def wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()

    @contextmanager
    def copying(self) -> Iterator[None]:
        stream: torch.cuda.Stream | None = getattr(self._threads, "stream", None)
        if stream is None:
            stream = self._threads.stream = torch.cuda.Stream(self.torch)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.torch), torch.cuda.stream(stream):
            yield
            stream.synchronize()

    def seed(self, *key: int | str) -> None:
        super().seed(*key)
        torch.cuda.default_generators[self.torch.index].manual_seed(keyed_seed(*key))

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def allocator_peak(self) -> int | None:
        return int(torch.cuda.max_memory_reserved(self.torch))


def open_device(name: str) -> Device:
    """`auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:1`. Raises OptionError for anything else."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return Device()
    kind, colon, index = name.partition(":")
    if name != "auto" and (kind != "cuda" or (colon and not index.isdecimal())):
        raise OptionError(f"--device: expected auto, cpu, cuda or cuda:N; found {name!r}.")
    if not torch.cuda.is_available():
        raise OptionError(f"--device {name}: no usable CUDA GPU was found. Use --device cpu.")
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise OptionError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA GPU(s), counted from 0.")
    return CudaDevice(number)


def keyed_seed(*key: int | str) -> int:
    """63 bits from `key`: the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def _cgroup_number(name: str) -> int | None:
    path = Path("/sys/fs/cgroup") / name
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_limit() -> int:
    return _cgroup_number("memory.max") or 1 << 62


def _cgroup_free() -> int:
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    return max(0, limit - used) if limit and used is not None else 1 << 62


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
