"""The memory limit: its margin, refusals, and its enforcement by the kernel or the allocator."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import psutil
import torch

from seqpart.device import cgroups
from seqpart.device.compiler import take_step, without_compiler
from seqpart.device.device import Device
from seqpart.device.pages import PAGE
from seqpart.device.process_limits import room
from seqpart.device.usage import MemoryUsage, read_process
from seqpart.errors import BadInput, DoesNotFit, OptionError, OutOfMemory, SeqpartError, first_line
from seqpart.units import format_limit, format_size, parse_size

_SLACK = 16 << 20
"""Bytes of a limit that no plan spends, for stacks and other reservations, which RLIMIT_DATA charges though untouched."""

RUNTIME_VARIES = 4 << 20
"""Bytes by which the runtimes of two processes may differ: 294 to 297 MB were seen."""

WARM_UP_BYTES = 10 << 20
"""Bytes that warm_up's small step and the probes of the machine take for a moment, before any plan: the least peak beyond the
runtime."""


def growth_beside(allowed: int, work: int) -> int:
    """Bytes of growth to expect on the CPU beside `work` bytes, at most `allowed`.

    Kernels pack their factors, and many blocks leave more small objects: beside 4 to 150 MB of work that was up to 4 MB of 12.
    With all 12 allowed, and a runtime of 226 MB, such peaks were predicted 4 to 8 % too high.
    """
    return min(allowed, allowed // 2 + work // 32)


def limit_of(asked: str | int | float, device: Device) -> int:
    """Returns --mem-limit in bytes. Raises OptionError for more than the device has."""
    total = device.total_memory()
    held = read_process().held if device.shares_memory else 0  # a limit on a process is one on what it holds already, too
    limit = parse_size(asked, total=total, free=min(total, held + device.free_memory()), name="--mem-limit")
    if limit < 1 << 16:
        raise OptionError(f"--mem-limit: expected a size such as 2GB; {asked!r} is {limit} bytes, less than any process has.")
    if limit >= total + PAGE:  # a cgroup's is whole pages
        there = "the device has"
        if device.shares_memory:
            of_cgroup = cgroups.limit(), "its cgroup allows (memory.max)"
            there = min((psutil.virtual_memory().total, there), of_cgroup, (room(), "this process may have (ulimit -v, -d)"))[1]
        raise OptionError(
            f"--mem-limit: {format_size(limit)} were asked for, and {there} {format_size(total)}. Give less, or auto."
        )
    return min(limit, total)


def warm_up(device: Device) -> None:
    """Runs small training steps: starts the OpenMP threads, autograd, the optimizer and the matrix library's workspaces."""
    width, out, batch = 1024, 256, 256
    layer = torch.nn.Linear(width, out, device=device.torch, dtype=torch.float32)
    with without_compiler():
        optimizer = torch.optim.Adam(layer.parameters(), fused=True)
    for _ in range(2):
        layer(torch.ones(batch, width, dtype=torch.float32, device=device.torch)).square().mean().backward()
        take_step(optimizer)
        layer.zero_grad(set_to_none=True)


def measure_runtime(device: Device) -> int:
    """Measures the bytes that the process (CPU) or its context (CUDA) holds for good, after every library has warmed up.

    Only young garbage is collected: a full collection, 0.4 s with large libraries, was made when the job began.
    """
    gc.collect(1)
    device.release_cached()
    return MemoryUsage(device).read()


def margin_of(limit: int) -> int:
    """Bytes left free under the limit, for unused reservations that RLIMIT_DATA charges, and noise of the runtime."""
    return limit // 100 + _SLACK


def left_of(limit: int) -> str:
    """Says in a refusal how many bytes the limit leaves."""
    return f"the limit of {format_size(limit)} leaves {format_size(max(0, limit - margin_of(limit)))} after its margin"


def what_helps(limit: int, runtime: int, peak: int, *, finer: bool = False, block: int, state: int = 0, rows: int = 0) -> str:
    """Advice in a refusal: only changes that may make the plan fit.

    peak: peak of the smallest plan. finer: True if --partitions asks for larger partitions than necessary. block: bytes of the
    largest partition, of which `state` are its optimizer's, and `rows` a requested micro-batch's.
    """
    available = limit - margin_of(limit)
    if runtime > available:
        return (
            f"The runtime alone takes {format_size(runtime)}, before any model, which is more: no other cut, method or "
            "optimizer helps. Give more."
        )
    over, cures = peak - available, []
    if finer:
        cures.append("cut finer (more --partitions, or auto), ")
    elif block > over:
        cures.append("split that block into smaller ones, ")
    if rows >= over:
        cures.append("give a smaller --micro-batch-size, ")
    if state >= over:
        cures.append("use an optimizer with less state (--optimizer sgd), ")
    advice = f"{''.join(cures)}{'or ' if cures else ''}give more."
    return advice[0].upper() + advice[1:]


def refused(message: str, smallest: int, rows: int | None = None, *, tried: bool = True) -> DoesNotFit:
    """Makes a refusal that names the least limit that is enough, at a micro-batch of `rows`. tried: True if blocks were run, so
    that what they take is known."""
    less = "" if tried else ", a little less or more: what blocks take there is measured when they are run"
    return DoesNotFit(message, smallest, f"\n  smallest limit that fits: {format_limit(smallest)}{less}.", rows)


def limit_for(peak: int) -> int:
    """The least limit whose margin leaves room for `peak`, even if the runtime of the next process is a little larger."""
    return -(-(peak + _SLACK + RUNTIME_VARIES) * 100 // 99) + 1


def any_plan_fits(device: Device, limit: int, *, beside: int = 0) -> bool:
    """True if the memory held now leaves room for the smallest plan. beside: bytes that other processes of the run hold."""
    if not device.shares_memory:
        return _free_of(device, limit) > 0
    room = limit - margin_of(limit) - WARM_UP_BYTES - beside
    if read_process().held > room:
        gc.collect()
    return read_process().held <= room


class _DataLimit:
    """RLIMIT_DATA of this process, shared by several holders, such as sessions: the least of their limits is set, and the last
    holder to release restores the original."""

    def __init__(self) -> None:
        self._held: dict[object, int] = {}
        self._before = resource.RLIM_INFINITY, resource.RLIM_INFINITY

    def hold(self, who: object, nbytes: int | None) -> None:
        """Holds a limit of `nbytes` for `who`; None releases it."""
        if not self._held:
            self._before = resource.getrlimit(resource.RLIMIT_DATA)
        soft, hard = self._before
        if nbytes is None:
            del self._held[who]
        else:
            self._held[who] = nbytes
        finite = [value for value in (*self._held.values(), soft, hard) if value != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(finite), hard) if self._held else self._before)


_DATA_LIMIT = _DataLimit()


class Grant(Protocol):
    def __call__(self, *, at_rest: bool = False, untouched: int = 0) -> bool: ...


@contextmanager
def enforced(device: Device, limit: int, *, beside: int = 0, untouched: int = 0) -> Iterator[Grant]:
    """A context in which the kernel or the allocator enforces the limit: an allocation beyond it fails, catchably.

    CPU: RLIMIT_DATA counts reserved bytes, so the difference to the bytes used now (library data, thread stacks: a constant) is
    granted on top. CUDA: the caching allocator's cap, which leaves out the context. Yields a function that also grants bytes
    reserved since then and not used, and returns True if there were any: those for generated code and, `at_rest`, when nothing
    is loaded, all others too, as of a heap that cannot shrink because its last bytes are in use. Its `untouched` bytes are
    granted until its next call, and those that were unused and are used by then no longer: glibc serves a thread whose
    allocation has failed from another heap, and then the holes of the first one stay. On CUDA it lowers the cap by what the
    context has grown. beside: bytes of the limit that other processes of the run have. untouched: bytes that kernels will
    reserve and not use.
    """
    if not device.shares_memory:
        with _capped_allocator(device, limit) as lower:
            yield lower
        return
    now = read_process()
    if now.held + beside >= limit:
        raise too_small(limit, now.held + beside)
    unused, code, granted, lent, used, over, me = now.data - now.anon, generated_code(), 0, 0, 0, False, object()

    def set_limit() -> None:
        # What is reserved and unused now may be used later, without the kernel's leave.
        _DATA_LIMIT.hold(me, limit - RUNTIME_VARIES - beside + unused + untouched + granted + lent - used)

    def grant(*, at_rest: bool = False, untouched: int = 0) -> bool:
        nonlocal granted, lent, used
        if over:
            return False
        more, now, before = (generated_code() - code) * 15 // 16, read_process(), (granted, lent, used)
        if at_rest:
            more = max(more, now.data - now.anon - unused)
        granted, lent = max(granted, more), untouched
        used = unused - (now.data - now.anon)
        used = used if used > RUNTIME_VARIES else 0
        if (granted, lent, used) != before:
            set_limit()
        return granted > before[0]

    set_limit()
    try:
        yield grant
    finally:
        over = True
        _DATA_LIMIT.hold(me, None)


def generated_code() -> int:
    """Bytes of this process's writable and executable memory. A convolution's kernel is generated for every shape, in a
    reservation of up to megabytes of which it fills one part in 40: 100 MB for a ResNet."""
    with open("/proc/self/maps", "rb") as maps:
        ranges = [line.split(b" ", 1)[0].split(b"-") for line in maps if b" rwxp " in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


@contextmanager
def _capped_allocator(device: Device, limit: int) -> Iterator[Grant]:
    usage = MemoryUsage(device)
    available = _free_of(device, limit, usage)
    if available <= 0:
        raise too_small(limit, limit - margin_of(limit) - available)
    device.restart_peaks()
    device.cap(available)

    def lower(*, at_rest: bool = False, untouched: int = 0) -> bool:
        """Lowers the cap where kernels that were loaded since have taken more than half of the margin."""
        nonlocal available
        reserved = device.reserved()
        free = _free_of(device, limit, usage)
        if free < available - margin_of(limit) // 2 and device.reserved() == reserved:  # else both looks are of other moments
            available = free
            device.cap(max(1, available))
        return False

    try:
        yield lower
    finally:
        device.cap(None)


def _free_of(device: Device, limit: int, usage: MemoryUsage | None = None) -> int:
    """Bytes that the context leaves of a limit. Kernels loaded later enlarge the context: the margin is for them."""
    return limit - margin_of(limit) - ((usage or MemoryUsage(device)).read() - device.reserved())


def too_small(limit: int, held: int) -> DoesNotFit:
    return DoesNotFit(
        f"the limit of {format_size(limit)} is used up before training begins: the process holds {format_size(held)}, for the "
        f"imported libraries and what the program has loaded beside the model. Give more than {format_limit(held)}."
    )


@contextmanager
def translate_oom(device: Device, when: str) -> Iterator[None]:
    """A context that turns failed allocations outside the loop, where no smaller micro-batch helps, into OutOfMemory."""
    try:
        yield
    except Exception as error:
        # The user's code or data may have run out of memory and be refused for it; other errors of ours say what they mean.
        if (isinstance(error, SeqpartError) and not isinstance(error, BadInput)) or not device.ran_out_of_memory(error):
            raise
        found = OutOfMemory(f"memory ran out while {when}: {first_line(error)}. Give a larger --mem-limit.")
        for note in getattr(error, "__notes__", []):
            found.add_note(note)
        raise found from error
