"""What benchmarks/gpu/assumptions.py measures of a device, each beside what the plan assumes of it.

By the device's own calls, so that the simulated one answers them too. Seconds are the host's around waits; the simulated device
has a clock of its own.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from seqpart.device.card import Hardware
from seqpart.device.compiler import take_step
from seqpart.device.device import DOWN, UP, Device
from seqpart.device.limit import margin_of, measure_runtime, warm_up
from seqpart.device.pages import aligned, bytes_of
from seqpart.device.simulated import SimulatedDevice
from seqpart.device.usage import MemoryUsage
from seqpart.store.direct import REQUEST, DirectFile

KIB, MIB = 1 << 10, 1 << 20
CUBLAS, CUBLAS_OF_HOPPER = 8 * MIB + 128 * KIB, 32 * MIB
"""A workspace of cuBLAS as PyTorch makes it: one for each thread that computes."""
_LIMIT = 2 * 10**9
"""A limit such as users give: its margin is what the context may grow by."""


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    unit: str = ""
    """B, B/s, s, FLOP/s, /s, share; none where there is only a note."""
    assumed: float | None = None
    measured: float | None = None
    note: str = ""
    field: str = ""
    """Of a hardware table, which this is."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """device: at work in this thread. assumed: the table that stands for it. quick: sizes for a processor."""

    device: Device
    assumed: Hardware | None
    folder: Path
    quick: bool
    noted: dict[str, int] = field(default_factory=dict)
    """What one measure leaves for another."""

    def now(self) -> float:
        return self.device.streams.seconds if isinstance(self.device, SimulatedDevice) else time.perf_counter()

    def rest(self) -> None:
        self.device.wait(self.device.mark())

    def seconds(self, work: Callable[[], object], repeats: int = 5) -> float:
        """Shortest of `repeats`, behind one that warms up."""
        best = math.inf
        for number in range(repeats + 1):
            self.rest()
            began = self.now()
            work()
            self.rest()
            best = min(best, self.now() - began) if number else best
        return best

    def table(self, field: str) -> float | None:
        return None if self.assumed is None else float(getattr(self.assumed, field))

    def flops(self, dtype: str) -> float | None:
        return None if self.assumed is None else self.assumed.flops[dtype]


Measure = Callable[[Bench], Iterator[Row]]


def rows_of(bench: Bench, measures: Iterable[Measure]) -> Iterator[Row]:
    """Every measure's; one that fails says so and keeps no other from being taken."""
    for measure in measures:
        try:
            yield from measure(bench)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            yield Row(what=measure.__name__.replace("_", " "), note=f"failed: {type(error).__name__}: {first[:200]}")


# --- memory -----------------------------------------------------------------------------------------------------------


def context(bench: Bench) -> Iterator[Row]:
    device, usage = bench.device, MemoryUsage(bench.device)
    bare = usage.read() - device.reserved()
    warm_up(device)
    bench.rest()
    runtime = measure_runtime(device)
    bench.noted["context"] = warm = usage.read() - device.reserved()
    assumed = bench.table("context")
    yield Row(what="the card's memory", unit="B", assumed=bench.table("memory"), measured=device.total_memory(), field="memory")
    yield Row(what="context, bare", unit="B", assumed=assumed, measured=bare, note=usage.source)
    yield Row(what="context after the warm-up", unit="B", assumed=assumed, measured=warm)
    yield Row(what="runtime that a plan begins with", unit="B", assumed=assumed, measured=runtime, field="context")


def granule(bench: Bench) -> Iterator[Row]:
    device = bench.device
    sizes = (1, device.granule + 1, 100_001)
    taken = []
    for nbytes in sizes:
        before = device.allocated()
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device.torch)
        taken.append(device.allocated() - before)
        del tensor
    yield Row(what="granule of the allocator", unit="B", assumed=device.granule, measured=math.gcd(*taken))
    for nbytes, segment in ((4 * KIB, 2 * MIB), (2 * MIB, 20 * MIB), (11 * MIB, 12 * MIB)):
        measured = _segment(device, nbytes)
        yield Row(what=f"segment for {nbytes // KIB} KiB", unit="B", assumed=segment, measured=measured)


def _segment(device: Device, nbytes: int) -> int:
    """Bytes that the allocator reserves at once where there is no free block."""
    device.release_cached()
    reserved, held = device.reserved(), list[torch.Tensor]()
    while device.reserved() == reserved:
        held.append(torch.empty(nbytes, dtype=torch.uint8, device=device.torch))
    return device.reserved() - reserved


def cublas(bench: Bench) -> Iterator[Row]:
    """PyTorch alone knows its workspaces."""
    if bench.device.kind != "cuda":
        return
    device = bench.device
    warm_up(device)
    bench.rest()
    known = device.allocated()
    layer = torch.nn.Linear(1024, 1024, device=device.torch)
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        layer(torch.ones(256, 1024, device=device.torch)).float().square().mean().backward()
    del layer
    bench.rest()
    more = device.allocated() - known
    torch._C._cuda_clearCublasWorkspaces()
    found = known + more - device.allocated()
    workspace = CUBLAS_OF_HOPPER if torch.cuda.get_device_capability(device.torch)[0] == 9 else CUBLAS
    yield Row(what="cuBLAS workspaces, both threads", unit="B", assumed=2 * workspace, measured=found)
    yield Row(what="what bfloat16 adds to them", unit="B", assumed=0, measured=more, note="growth has to cover it")
    warm_up(device)


def growth(bench: Bench) -> Iterator[Row]:
    device, width = bench.device, 256 if bench.quick else 2048
    mlp = [torch.nn.Linear(width, width) for _ in range(8)]
    channels, side = (16, 16) if bench.quick else (64, 56)
    convolutions = [torch.nn.Conv2d(channels, channels, 3, padding=1) for _ in range(4)]
    shapes: dict[str, tuple[Sequence[torch.nn.Module], tuple[int, ...]]]
    shapes = {"MLP": (mlp, (64, width)), "convolutions": (convolutions, (32, channels, side, side))}
    for name, (layers, shape) in shapes.items():
        lost = _lost(bench, layers, shape)
        yield Row(what=f"reserved beyond allocated, {name}", unit="B", assumed=device.growth, measured=lost)
    for name, nbytes in _workspaces(bench, channels, side).items():
        yield Row(what=f"workspace of a convolution, {name}", unit="B", assumed=device.growth, measured=nbytes)


def _lost(bench: Bench, layers: Sequence[torch.nn.Module], shape: tuple[int, ...]) -> int:
    """Between two peaks of a training step: what the allocator reserved and what tensors had."""
    device = bench.device
    module = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU()))).to(device.torch)
    if isinstance(device, SimulatedDevice):  # whose tensors are the processor's: a move would be none
        for parameter in module.parameters():
            parameter.data = torch.ones(parameter.shape, device=device.torch)
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    x = torch.ones(*shape, device=device.torch)
    bench.rest()
    device.release_cached()
    device.restart_peaks()
    for _ in range(3):
        module(x).square().mean().backward()
        take_step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    bench.rest()
    return (device.allocator_peak() or 0) - device.allocated_peak()


def _workspaces(bench: Bench, channels: int, side: int) -> dict[str, int]:
    """What one operation had at its peak and gave back."""
    device = bench.device
    x = torch.ones(32, channels, side, side, device=device.torch, requires_grad=True)
    weight = torch.ones(channels, channels, 3, 3, device=device.torch, requires_grad=True)
    found = {}
    device.restart_peaks()
    y = torch.nn.functional.conv2d(x, weight, padding=1)
    bench.rest()
    found["forward"] = device.allocated_peak() - device.allocated()
    gradient = torch.ones(y.shape, device=device.torch)
    device.restart_peaks()
    gradients = torch.autograd.grad(y, (x, weight), gradient)
    bench.rest()
    found["backward"] = device.allocated_peak() - device.allocated()
    del gradients
    return found


# --- links ------------------------------------------------------------------------------------------------------------


def copies(bench: Bench) -> Iterator[Row]:
    largest = 16 * MIB if bench.quick else 256 * MIB
    sizes = [4 * KIB, 64 * KIB, MIB, 16 * MIB, largest]
    latency = bench.table("copy_latency")
    for way, link in ((UP, "h2d"), (DOWN, "d2h")):
        rate = bench.table(link)
        for nbytes in sorted(set(sizes)):
            took = _copying(bench, way, nbytes)
            expected = None if rate is None or latency is None else nbytes / (latency + nbytes / rate)
            row = Row(what=f"copies {way}, {_size(nbytes)}", unit="B/s", assumed=expected, measured=nbytes / took)
            yield row if nbytes < largest else replace(row, assumed=rate, field=link)
            if nbytes == sizes[0] and way == UP:
                yield Row(what="a small copy, and the wait", unit="s", assumed=latency, measured=took, field="copy_latency")
    yield from _both_ways(bench, largest)


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def _copying(bench: Bench, way: str, nbytes: int) -> float:
    device = bench.device
    host, there = device.host(nbytes)[:nbytes], device.empty(nbytes)[:nbytes]
    source, target = (host, there) if way == UP else (there, host)

    def copy() -> None:
        with device.copying(way):
            device.copy(source, target)
            device.wait(device.mark())

    return bench.seconds(copy)


def _both_ways(bench: Bench, nbytes: int) -> Iterator[Row]:
    device = bench.device
    hosts, there = [device.host(nbytes)[:nbytes] for _ in range(2)], [device.empty(nbytes)[:nbytes] for _ in range(2)]

    def copy() -> None:
        with device.copying(UP):
            device.copy(hosts[0], there[0])
            up = device.mark()
        with device.copying(DOWN):
            device.copy(there[1], hosts[1])
            down = device.mark()
        device.wait(up)
        device.wait(down)

    rates = bench.table("h2d"), bench.table("d2h")
    expected = None if rates[0] is None or rates[1] is None else 2 * min(rates[0], rates[1])
    measured = 2 * nbytes / bench.seconds(copy)
    yield Row(what="both ways at once, together", unit="B/s", assumed=expected, measured=measured)


def waiting(bench: Bench) -> Iterator[Row]:
    """Of this thread's processor, while it waits for a large copy."""
    if bench.device.kind != "cuda":
        return
    device, nbytes = bench.device, 512 * MIB
    host, there = device.host(nbytes), device.empty(nbytes)
    bench.rest()
    with device.copying(UP):
        device.copy(host, there)
        event = device.mark()
    began, used = time.perf_counter(), time.thread_time()
    device.wait(event)
    share = (time.thread_time() - used) / (time.perf_counter() - began)
    yield Row(what="processor that a wait takes", unit="share", assumed=0.0, measured=share, note="1: it spins")


# --- computation ------------------------------------------------------------------------------------------------------


def launches(bench: Bench) -> Iterator[Row]:
    x, count = torch.zeros(1, device=bench.device.torch), 200 if bench.quick else 5000

    def many() -> None:
        for _ in range(count):
            x.add_(1)

    took = bench.seconds(many, repeats=3) / count
    yield Row(what="launch of a kernel", unit="s", assumed=bench.table("launch"), measured=took, field="launch")


def matmuls(bench: Bench) -> Iterator[Row]:
    size = 1024 if bench.quick else 8192
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        one, other = (torch.ones(size, size, dtype=dtype, device=bench.device.torch) for _ in range(2))
        took = bench.seconds(lambda one=one, other=other: one @ other, repeats=1 if bench.quick else 5)  # type: ignore[misc]
        rate = 2 * size**3 / took
        yield Row(
            what=f"matrix product, {name}", unit="FLOP/s", assumed=bench.flops(name), measured=rate, field=f"flops.{name}"
        )


def memory(bench: Bench) -> Iterator[Row]:
    x = torch.ones(4 * MIB if bench.quick else 256 * MIB, device=bench.device.torch)
    rate = 2 * x.nbytes / bench.seconds(lambda: x.mul_(1.0))
    assumed = bench.table("memory_bandwidth")
    yield Row(what="memory, element by element", unit="B/s", assumed=assumed, measured=rate, field="memory_bandwidth")


def optimizer(bench: Bench) -> Iterator[Row]:
    parameter = torch.nn.Parameter(torch.ones(MIB if bench.quick else 128 * MIB, device=bench.device.torch))
    parameter.grad = torch.ones(parameter.shape, device=bench.device.torch)
    steps = torch.optim.Adam([parameter], fused=True)
    rate = parameter.numel() / bench.seconds(lambda: take_step(steps))
    yield Row(what="parameters of a fused Adam", unit="/s", assumed=bench.table("optimizer"), measured=rate)


# --- disk, and what has grown -----------------------------------------------------------------------------------------


def disk(bench: Bench) -> Iterator[Row]:
    nbytes = 4 * MIB if bench.quick else 1 << 30
    piece = bytes_of(aligned(min(REQUEST, nbytes)))
    piece[:] = bytes(range(256)) * (len(piece) // 256)
    rates: list[float] = []
    with DirectFile.unnamed(bench.folder) as file:
        for move in (file.write_from, file.read_into):
            began = bench.now()
            for offset in range(0, nbytes, len(piece)):
                move(piece, offset)
            if not rates:
                file.finish(nbytes, durable=True)
            rates.append(nbytes / (bench.now() - began))
        note = "around the page cache" if file.direct else "through the page cache: O_DIRECT is refused here"
    for way, rate in zip(("disk_write", "disk_read"), rates, strict=True):
        yield Row(what=way.replace("_", ", "), unit="B/s", assumed=bench.table(way), measured=rate, field=way, note=note)


def context_now(bench: Bench) -> Iterator[Row]:
    """After all of the above: what kernels that were loaded late have added."""
    bench.rest()
    grown = MemoryUsage(bench.device).read() - bench.device.reserved()
    yield Row(what="context after everything", unit="B", assumed=bench.table("context"), measured=grown)
    more = grown - bench.noted.get("context", grown)
    yield Row(what="of it since the warm-up", unit="B", assumed=margin_of(_LIMIT), measured=more, note="the margin of 2 GB")


MEASURES: tuple[Measure, ...] = (
    context, granule, cublas, growth, copies, waiting, launches, matmuls, memory, optimizer, disk, context_now,
)  # fmt: skip
