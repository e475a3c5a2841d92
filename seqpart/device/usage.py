"""Reads how much memory is held, from the kernel and the driver.

On CPU the figure is RssAnon + RssShmem of the process tree: memory that only this program holds. VmHWM and RSS would
add file pages, which the kernel drops at will. On CUDA it is NVML's figure for this process, context included.

A sample every 10 ms misses shorter peaks. VmHWM misses nothing: what it rose by between two samples was held, except for file
pages, which hardly change while a network is trained. Children have no such mark that we may reset.
"""

import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from seqpart.device.device import Device
from seqpart.device.nvml import NvmlUsage
from seqpart.device.process_limits import figure, held, set_mark_back, status_of

_FELL = 1 << 20
"""Decrease of file pages in bytes above which VmHWM is reset."""
_STATUS_FIELDS = (b"RssAnon:", b"RssShmem:", b"RssFile:", b"VmData:")


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample of a process's memory, in bytes."""

    anon: int = 0
    shmem: int = 0
    file: int = 0
    data: int = 0

    @property
    def held(self) -> int:
        """Bytes that only this process holds."""
        return self.anon + self.shmem


def read_process(pid: int | str = "self") -> Reading:
    """The kernel's figures for one process; zeros when it is gone."""
    try:
        text = status_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return Reading()
    return Reading(*(figure(text, name) for name in _STATUS_FIELDS))


def held_by_tree(pid: int) -> int:
    """Bytes that a process and all its descendants hold."""
    return read_process(pid).held + sum(map(held_by_tree, _children(pid)))


def _children(pid: int) -> Iterator[int]:
    """Children with memory of their own."""
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with open(thread / "children", "rb") as file:
                numbers = [int(number) for number in file.read().split()]
            yield from (child for child in numbers if not _same_memory(pid, child))
    except (FileNotFoundError, ProcessLookupError):
        return


def _same_memory(parent: int, child: int) -> bool:
    """True if the child still runs in its parent's address space, as between vfork and exec: it has no memory of its own.

    Then all figures of /proc are the same for both. A forked copy differs: it begins without file pages.
    """
    return _address_space(parent) == _address_space(child)


def _address_space(pid: int) -> list[bytes]:
    """Size of the address space, its resident part and that one's limit, begin and end of code, and begin of the stack."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[20:26]
    except (FileNotFoundError, ProcessLookupError):
        return []


class MemoryUsage:
    """The figure that is compared with the limit on this device, and its name."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._nvml = None
        if device.kind == "cuda":
            # ROCm's PyTorch may come without a uuid, and has no NVML: then the figure says what stands in.
            uuid = getattr(torch.cuda.get_device_properties(device.torch), "uuid", "")
            self._nvml = NvmlUsage(str(uuid), device.reserved)
        self._tree = _TreeUsage() if device.shares_memory else None

    @property
    def source(self) -> str:
        if self._tree:
            return "RssAnon + RssShmem of the process tree"
        return self._nvml.source if self._nvml else f"of the {self._device.name}: its context and what the allocator reserved"

    def watch(self) -> None:
        """Makes `read` also find peaks between two samples, where the system marks them."""
        if self._tree:
            self._tree.set_back()

    def grant(self, shared: int) -> None:
        """Leaves out `shared` bytes of RssShmem: the host memory that --ram-limit grants beside the limit."""
        if self._tree:
            self._tree.granted = shared

    def read(self) -> int:
        """Bytes held now."""
        if self._tree:
            return self._tree.read()
        return self._nvml.read() if self._nvml else self._device.used()


class _TreeUsage:
    """Figure of the process tree: this process through one open file, 10 us a sample; children, 100 us, if there are any."""

    def __init__(self) -> None:
        self._pid, self.granted = os.getpid(), 0
        self._mark = self._files = -1
        """VmHWM and RssFile at the last sample; -1 while the mark is not reset."""
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        weakref.finalize(self, os.close, self._status).atexit = False  # a thread may look until the process is gone

    def set_back(self) -> None:
        """Resets VmHWM to the bytes held now."""
        if not set_mark_back():  # then only samples are left
            self._mark = self._files = -1
            return
        text = os.pread(self._status, 8192, 0)
        self._mark, self._files = figure(text, b"VmHWM:"), figure(text, b"RssFile:")

    def read(self) -> int:
        text = os.pread(self._status, 8192, 0)
        shared = figure(text, b"RssShmem:")
        used = max(held(text), self._between(text)) - min(shared, self.granted)
        if _has_children():
            used += sum(map(held_by_tree, _children(self._pid)))
        return used

    def _between(self, text: bytes) -> int:
        """Most bytes held since the last sample, if the mark has risen, less the larger count of file pages; otherwise 0."""
        if self._mark < 0:
            return 0
        mark, files = figure(text, b"VmHWM:"), figure(text, b"RssFile:")
        held = mark - max(files, self._files) if mark > self._mark else 0
        if files < self._files - _FELL:  # under a mark with more file pages a peak would hide
            self.set_back()
        else:
            self._mark, self._files = mark, files
        return held


def _has_children() -> bool:
    """True if this process has children. Takes one system call; listing and measuring them takes many."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class Reservations:
    """Measures exactly the most bytes reserved since `restart`: kernels do not touch all that they reserve.

    The kernel's mark, VmPeak, cannot be reset. So a mapping without any access, which no limit charges, first raises the
    reserved bytes to the mark: from there on it rises with every reservation.
    """

    def __init__(self) -> None:
        self._filler: mmap.mmap | None = None
        self._from = 0

    def restart(self) -> None:
        """Starts the measurement of `most`."""
        self.end()
        size, most = _sizes()
        if most > size:
            self._filler = mmap.mmap(-1, most - size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        self._from = _sizes()[0]

    def most(self) -> int:
        """Most bytes beyond those reserved at `restart`."""
        return _sizes()[1] - self._from

    def end(self) -> None:
        if self._filler is not None:
            self._filler.close()
            self._filler = None


def _sizes() -> tuple[int, int]:
    text = status_of()
    return figure(text, b"VmSize:"), figure(text, b"VmPeak:")
