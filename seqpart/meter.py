"""How much memory there is, read from the kernel and the driver, and the limit that they enforce.

On CPU the figure is RssAnon + RssShmem of the process tree: memory that only this program holds. VmHWM and RSS would
add file pages, which the kernel drops at will. On CUDA it is NVML's figure for this process, context included.
"""

import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from seqpart.device import Device
from seqpart.errors import DoesNotFit
from seqpart.units import format_limit, format_size

_STATUS_FIELDS = ("RssAnon", "RssShmem", "RssFile", "VmData")
THREAD_STACKS = 3 * (8 << 20)
"""Reserved, not used: the stacks of threads that start after the limit is set."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the memory, in bytes."""

    anon: int = 0
    shmem: int = 0
    file: int = 0
    data: int = 0

    def __add__(self, other: "Reading") -> "Reading":
        return Reading(self.anon + other.anon, self.shmem + other.shmem, self.file + other.file, self.data + other.data)


def read_process(pid: int | str = "self") -> Reading:
    """The kernel's figures for one process; zeros when it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            lines = status.read().split(b"\n")
    except (FileNotFoundError, ProcessLookupError):
        return Reading()
    found = {}
    for line in lines:
        key, _, value = line.partition(b":")
        found[key] = value
    return Reading(*(int(found[name.encode()].split()[0]) * 1024 if name.encode() in found else 0 for name in _STATUS_FIELDS))


def read_tree(pid: int | None = None) -> Reading:
    """A process and all its descendants."""
    pid = pid or os.getpid()
    total = read_process(pid)
    for child in _children(pid):
        total += read_tree(child)
    return total


def _children(pid: int) -> Iterator[int]:
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with open(thread / "children", "rb") as file:
                yield from map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        return


class Gauge:
    """The figure that is held against the limit on this device, and its name."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._nvml = _NvmlGauge(device.torch.index) if device.kind == "cuda" else None

    @property
    def source(self) -> str:
        return self._nvml.source if self._nvml else "RssAnon + RssShmem of the process tree"

    def read(self) -> int:
        if self._nvml:
            return self._nvml.read()
        reading = read_tree()
        return reading.anon + reading.shmem


class _NvmlGauge:
    """NVML's per-process figure; where the driver gives none (WSL, Windows, containers) what stands in is named."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._handle: object = None
        self.source = "torch's reserved memory (NVML is not available; the context is not counted)"
        try:
            import pynvml

            pynvml.nvmlInit()
            # By UUID: CUDA_VISIBLE_DEVICES renumbers CUDA's indices, not NVML's.
            uuid = str(torch.cuda.get_device_properties(index).uuid)
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except Exception as error:
            self.source = f"torch's reserved memory (NVML: {error}; the context is not counted)"
            return
        self._nvml, self._handle = pynvml, handle
        self._others = 0
        self._per_process = self._own() is not None
        self.source = "NVML, this process"
        if not self._per_process:
            self._others = max(0, self._used() - torch.cuda.memory_reserved(index))
            self.source = "NVML, growth of the whole device since start (no per-process figure here), plus the context"
            self._others = max(0, self._others - _CONTEXT_GUESS)

    def _own(self) -> int | None:
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
        return None

    def _used(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def read(self) -> int:
        if self._handle is None:
            return int(torch.cuda.memory_reserved(self._index))
        if self._per_process:
            return self._own() or 0
        return max(0, self._used() - self._others)


_CONTEXT_GUESS = 512 << 20
"""Bytes of context assumed to be ours where NVML cannot tell ours from others'."""


class Sampler:
    """Reads the gauge every `interval` seconds in a thread, and remembers the peak and what was running then."""

    def __init__(self, gauge: Gauge, limit: int, interval: float = 0.005) -> None:
        self.gauge, self.limit, self.interval = gauge, limit, interval
        self.label: Callable[[], str] = lambda: ""
        self.peak = self.violations = self.samples = 0
        self.peak_label = self.violation_label = ""
        self.file_growth = 0
        self._file_start = read_process().file
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="seqpart-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.sample()
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def sample(self) -> int:
        used = self.gauge.read()
        self.samples += 1
        if used > self.peak:
            self.peak, self.peak_label = used, self.label()
        if used > self.limit:
            self.violations += 1
            self.violation_label = self.violation_label or self.label()
        return used

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self.sample()
            if self.samples % 20 == 0:
                self.file_growth = max(self.file_growth, read_process().file - self._file_start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The last line of every run."""

    limit: int
    peak: int
    source: str
    predicted: int
    runtime: int
    """What the imported libraries (CPU) or the context (CUDA) took before any training."""
    allocator_peak: int | None
    file_growth: int
    samples: int
    violations: int

    def __str__(self) -> str:
        allocator = f", allocator peak {format_size(self.allocator_peak)}" if self.allocator_peak is not None else ""
        return (
            f"proof: limit {format_size(self.limit)}, measured peak {format_size(self.peak)} ({self.source}, "
            f"{self.samples} samples), predicted {format_size(self.predicted)}{allocator}, "
            f"of it runtime {format_size(self.runtime)}; file pages grew {format_size(self.file_growth)}; "
            f"violations {self.violations}"
        )


def measure_runtime(device: Device) -> int:
    """Bytes that the process (CPU) or its context (CUDA) holds once every library has warmed up.

    One small training step starts the OpenMP threads, autograd, the optimizer and the matrix library's workspaces.
    """
    width, batch = 1024, 256
    layer = torch.nn.Linear(width, width, device=device.torch)
    optimizer = torch.optim.Adam(layer.parameters(), fused=True)
    for _ in range(2):
        layer(torch.ones(batch, width, device=device.torch)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    del layer, optimizer
    gc.collect()
    device.release_cached()
    return Gauge(device).read()


@contextmanager
def enforced(device: Device, limit: int) -> Iterator[None]:
    """Hold the limit by something that is not ours while the body runs: an allocation beyond it fails, catchably.

    CPU: RLIMIT_DATA counts what is reserved, so the difference to what is used now (library data, thread stacks:
    a constant) is granted on top. CUDA: the caching allocator's cap, which leaves out the context.
    """
    if device.kind == "cuda":
        with _capped_allocator(device, limit):
            yield
        return
    now = read_process()
    if now.anon + now.shmem >= limit:
        raise too_small(limit, now.anon + now.shmem)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    ours = limit + (now.data - now.anon)
    capped = [value for value in (ours, soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(capped), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def _capped_allocator(device: Device, limit: int) -> Iterator[None]:
    context = Gauge(device).read() - torch.cuda.memory_reserved(device.torch)
    room = limit - context
    if room <= 0:
        raise too_small(limit, context)
    torch.cuda.reset_peak_memory_stats(device.torch)
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / device.total_memory()), device.torch)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device.torch)


def too_small(limit: int, runtime: int) -> DoesNotFit:
    return DoesNotFit(
        f"the limit of {format_size(limit)} is used up before training begins: the imported libraries hold "
        f"{format_size(runtime)} of it. Give more than {format_limit(runtime)}.",
        smallest=None,
    )


def seconds_of(work: Callable[[], object], repeats: int = 3) -> float:
    """Shortest of `repeats` timings of `work`, in seconds."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
