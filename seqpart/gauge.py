"""How much memory there is, read from the kernel and the driver.

On CPU the figure is RssAnon + RssShmem of the process tree: memory that only this program holds. VmHWM and RSS would
add file pages, which the kernel drops at will. On CUDA it is NVML's figure for this process, context included.
"""

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from seqpart.device import Device

_STATUS_FIELDS = (b"RssAnon:", b"RssShmem:", b"RssFile:", b"VmData:")


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
            text = status.read()
    except (FileNotFoundError, ProcessLookupError):
        return Reading()
    return Reading(*(_field(text, name) for name in _STATUS_FIELDS))


def read_tree(pid: int | None = None) -> Reading:
    """A process and all its descendants."""
    pid = pid or os.getpid()
    total = read_process(pid)
    for child in _children(pid):
        total += read_tree(child)
    return total


def _children(pid: int) -> Iterator[int]:
    """Those with memory of their own."""
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with open(thread / "children", "rb") as file:
                numbers = [int(number) for number in file.read().split()]
            yield from (child for child in numbers if not _same_memory(pid, child))
    except (FileNotFoundError, ProcessLookupError):
        return


def _same_memory(parent: int, child: int) -> bool:
    """Whether the child still runs in its parent's address space, as between vfork and exec: nothing of it is its own.

    Then all that /proc says of the one's memory it says of the other's. A forked copy differs: it begins without file pages.
    """
    return _address_space(parent) == _address_space(child)


def _address_space(pid: int) -> list[bytes]:
    """Its size, what of it is in memory, that one's limit, where code begins and ends, and where the stack begins."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[20:26]
    except (FileNotFoundError, ProcessLookupError):
        return []


class Gauge:
    """The figure that is held against the limit on this device, and its name."""

    def __init__(self, device: Device) -> None:
        self._nvml = _NvmlGauge(device.torch.index) if device.kind == "cuda" else None
        self._tree = None if self._nvml else _TreeGauge()

    @property
    def source(self) -> str:
        return self._nvml.source if self._nvml else "RssAnon + RssShmem of the process tree"

    def grant(self, shared: int) -> None:
        """Leave `shared` bytes of RssShmem out: the host memory that --ram-limit grants beside the limit."""
        if self._tree:
            self._tree.granted = shared

    def read(self) -> int:
        """Bytes."""
        if self._tree:
            return self._tree.read()
        assert self._nvml is not None
        return self._nvml.read()


class _TreeGauge:
    """This process's figure through one open file, 10 us a look; children, 100 us, only now and then until there is one."""

    every = 10

    def __init__(self) -> None:
        self._pid, self._looks, self._parents, self.granted = os.getpid(), 0, False, 0
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        weakref.finalize(self, os.close, self._status)

    def read(self) -> int:
        text = os.pread(self._status, 8192, 0)
        used = _field(text, b"RssAnon:") + max(0, _field(text, b"RssShmem:") - self.granted)
        if self._parents or self._looks % self.every == 0:
            readings = [read_tree(child) for child in _children(self._pid)]
            self._parents = bool(readings)
            used += sum(reading.anon + reading.shmem for reading in readings)
        self._looks += 1
        return used


def _field(text: bytes, name: bytes) -> int:
    at = text.find(name)
    return int(text[at + len(name) : text.index(b"k", at)]) * 1024 if at >= 0 else 0


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
