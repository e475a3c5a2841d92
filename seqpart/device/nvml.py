"""NVML's figure for this process on one GPU or MIG instance, context included; without one a substitute is used, and named.

torch's own count would not do: it leaves out the context, a quarter to half a gigabyte. A substitute is never less than this
process holds, where that can be known: the figure proves a limit.

    NVML lists this process        its figure
    it does not (containers, WSL)  what is used on the whole card, less what others must have held at the start
    NVML says neither              torch's reserved memory
    NVML fails during the run      torch's reserved memory and the context as last seen, for as long as it fails
"""

import os
from collections.abc import Callable
from typing import Any

from seqpart.units import format_size

MOST_CONTEXT = 1 << 30
"""Bytes taken for our context where NVML does not separate our memory from others'. Less could hide a part of it
from the limit: 0.3 GB is usual, large cards take more, and over 1 GB only what loads all kernels at once does (PyTorch issue
107667)."""


class NvmlUsage:
    """Bytes of GPU memory that this process holds, and the name of the figure."""

    def __init__(self, uuid: str, reserved: Callable[[], int]) -> None:
        self._reserved = reserved
        """Bytes that torch's allocator holds on this device."""
        self._figure = _best_figure(uuid, reserved)
        self._looks = self._misses = 0
        self._first_miss = ""

    @property
    def source(self) -> str:
        if not self._misses:
            return self._figure.name
        return (
            f"{self._figure.name}; it failed ({self._first_miss}), and torch's reserved memory and "
            f"{format_size(self._figure.context)} for the context stood in at {self._misses} of {self._looks} looks"
        )

    def read(self) -> int:
        self._looks += 1
        try:
            return self._figure.read()
        except Exception as error:  # of whatever kind: the thread that samples must go on
            self._first_miss = self._first_miss or str(error)
            self._misses += 1
            return self._reserved() + self._figure.context


class _NoFigure(Exception):
    """NVML answered, but not with what this process holds."""


def _best_figure(uuid: str, reserved: Callable[[], int]) -> "_OfProcess | _OfWholeCard | _OfAllocator":
    """Returns the first figure that can be read."""
    try:
        card = _Card(uuid)
    except Exception as error:  # no nvidia-ml-py, no library, no driver, no such device
        return _OfAllocator(reserved, str(error))
    try:
        return _OfProcess(card, reserved)
    except Exception as error:
        reason = str(error)
    try:
        return _OfWholeCard(card, reserved, reason)
    except Exception as error:
        return _OfAllocator(reserved, f"{reason}; of the whole card: {error}")


class _OfProcess:
    """What NVML says of this process. `context`: bytes beside the allocator's, as seen last."""

    name = "NVML, this process"

    def __init__(self, card: "_Card", reserved: Callable[[], int]) -> None:
        self._card, self._reserved = card, reserved
        self.context, self._before = 0, reserved()
        self.read()

    def read(self) -> int:
        held, reserved = self._card.held(), self._reserved()
        if held <= reserved:  # more was reserved between the two looks, or never was it this process's figure
            held = self._card.held()
        if held <= reserved:
            raise _NoFigure("what NVML says of this process is less than torch's own count")
        if reserved == self._before:  # else some of the difference may be no context
            self.context = held - reserved
        self._before = reserved
        return held


class _OfWholeCard:
    """Bytes used by all less what others held at the start; never less than ours, even if others free memory later."""

    def __init__(self, card: "_Card", reserved: Callable[[], int], reason: str) -> None:
        self._card, self._reserved = card, reserved
        beside = max(0, card.used() - reserved())
        self.context = min(MOST_CONTEXT, beside)
        self._others = beside - self.context
        self.name = f"NVML, all that is used on the card instead of this process's figure ({reason})"
        if self._others:
            others, context = format_size(self._others), format_size(self.context)
            self.name += f"; at the start {others} was taken for others' and {context} for the context"

    def read(self) -> int:
        return max(self._card.used() - self._others, self._reserved() + self.context)


class _OfAllocator:
    context = 0

    def __init__(self, reserved: Callable[[], int], reason: str) -> None:
        self.read = reserved
        self.name = f"torch's reserved memory (NVML: {reason}; the context is not counted)"


class _Card:
    """One GPU or MIG instance through nvidia-ml-py. Every call raises NVMLError where the driver refuses."""

    def __init__(self, uuid: str) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._handle = pynvml, _handle(pynvml, uuid)
        self._pids = _own_pids()
        try:
            # Without what the driver keeps for itself: 0.9 GB of an A100, which the older call counts as used.
            self._version = pynvml.nvmlMemory_v2
            self.used()
        except pynvml.NVMLError:
            self._version = None

    def held(self) -> int:
        """Bytes used by this process. Raises _NoFigure."""
        listed = self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(self._handle)
        found = [process.usedGpuMemory for process in listed if process.pid in self._pids]
        if not found:
            raise _NoFigure("NVML does not list this process, as in a container")
        known = [int(used) for used in found if used is not None]
        if not known:
            raise _NoFigure("NVML says of no process what it holds, as under WSL")
        # "All of the memory used by the application", says NVML of each: a process that is listed twice, as computing and
        # as drawing or once for each of its contexts, holds that once.
        return max(known)

    def used(self) -> int:
        """Bytes used by all processes."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle, self._version).used)


def _handle(nvml: Any, uuid: str) -> object:
    """NVML's handle by UUID: CUDA_VISIBLE_DEVICES renumbers CUDA's indices, not NVML's. CUDA's text may lack NVML's prefix."""
    if uuid.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _own_pids() -> set[int]:
    """This process's numbers in its own pid namespace and in those around it, as far as /proc shows them.

    NVML lists the host's numbers, of which a container knows nothing. Some drivers list the container's.
    """
    with open("/proc/self/status", "rb") as status:
        numbers = [line.split()[1:] for line in status if line.startswith(b"NSpid:")]
    return {os.getpid(), *(int(number) for line in numbers for number in line)}
