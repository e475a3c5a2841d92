"""Speeds of this machine, measured at start: a matrix product, an optimizer step, the disk."""

import logging
import math
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from seqpart.device.card import Hardware
from seqpart.device.compiler import take_step
from seqpart.device.device import DOWN, UP, Device
from seqpart.device.limit import measure_runtime
from seqpart.model.optimizers import Optimizer
from seqpart.model.rounding import NARROW
from seqpart.model.slices import most_threads
from seqpart.profile.partition import PartitionCost
from seqpart.store.direct import probe_disk

_LOGGER = logging.getLogger("seqpart.planning")


_HALF_RATE_ROWS = 12
"""Rows at which a matrix kernel reaches half its rate on 2 cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Speeds of this machine per second, measured at start."""

    flops: float
    """Floating-point operations per second."""
    optimizer: float
    """Parameters updated per second."""
    host_optimizer: float = math.inf
    """Parameters updated per second by the processor, beside a device that is another."""
    read: float
    write: float
    """Bytes per second of the disk."""
    up: float = math.inf
    down: float = math.inf
    """Bytes per second from pinned memory to the device, and back. On the CPU both are the same memory."""
    copy: float = math.inf
    """Bytes per second copied within the device's memory."""
    half_rate_rows: int = _HALF_RATE_ROWS
    """Rows at which a matrix kernel reaches half its rate."""

    def computing(self, cost: PartitionCost, rows: int, *, forward: int, backward: int, keeps_heap: bool = False) -> float:
        """Seconds of `forward` and `backward` passes of `rows` rows. A kernel reaches its full rate only with enough rows.

        keeps_heap: freed memory stays for later tensors; `forward_seconds` and `backward_seconds` were measured without that.
        """
        timed = forward * cost.forward_seconds + backward * cost.backward_seconds
        counted = (forward + 2 * backward) * cost.row_flops / self.flops
        timed *= (rows + self.half_rate_rows) / (cost.rows + self.half_rate_rows)
        return (cost.kept_share if keeps_heap else 1.0) * (timed + counted * (rows + self.half_rate_rows))


def measure_speeds(
    device: Device, optimizer: Optimizer, rows: int, folder: Path, dry: bool = False, autocast: torch.dtype | None = None
) -> Speeds:
    """Measures speeds for micro-batches of `rows` rows and homes under `folder`, where a `dry` run makes no visible file.

    autocast: type of matrix products in mixed precision. Raises StoreError where the folder cannot be written.
    """
    if device.hardware is not None:
        return speeds_of(device.hardware, autocast)
    _LOGGER.debug("the speed of the disk and of matrix products is measured")
    # First: its buffer is gone when the others come.
    read, write = probe_disk(existing(folder), hidden=dry, nbytes=MEASURED.disk_probe)
    copy = _copies(device)
    weight = torch.ones(1024, 1024, dtype=torch.float32, device=device.torch)

    def products(x: torch.Tensor) -> None:
        with device.autocast(autocast):
            for _ in range(4):
                x @ weight

    def took(count: int) -> float:
        x = torch.ones(count, 1024, dtype=torch.float32, device=device.torch)
        return _seconds(device, partial(products, x))

    per_row, half_rate_rows = took(rows) / rows, _HALF_RATE_ROWS
    if not device.shares_memory:
        few, per_row = per_row * rows, took(_MANY * rows) / (_MANY * rows)
        half_rate_rows = max(0, round((few - rows * per_row) / per_row))
    in_slices = device.shares_memory and optimizer.at_once > 0
    up, down = (math.inf, math.inf) if device.shares_memory else (_link(device, UP), _link(device, DOWN))
    return Speeds(
        flops=4 * 2 * 1024**2 / per_row,
        optimizer=_steps_in_slices(device, optimizer, weight) if in_slices else _steps(device, optimizer, weight[:256]),
        host_optimizer=math.inf if device.shares_memory else _steps(device, optimizer, weight.cpu().repeat(1, 4)),
        read=read,
        write=write,
        up=up,
        down=down,
        copy=copy,
        half_rate_rows=half_rate_rows,
    )


def _steps(device: Device, optimizer: Optimizer, weight: torch.Tensor) -> float:
    """Measures parameters per second of an optimizer step on `weight`, where that lies."""
    parameter = torch.nn.Parameter(weight.to(NARROW) if optimizer.moments is not None else weight)
    parameter.grad = torch.ones_like(parameter)
    return parameter.numel() / _seconds(device, partial(take_step, optimizer.build([parameter])))


def _seconds(device: Device, work: Callable[[], object]) -> float:
    """Shortest timing of `work` on the device, after a first one."""

    def done() -> None:
        work()
        device.wait(device.mark())

    done()
    return seconds_of(done)


_TWO_THREADS = 1.3
"""How much faster two or more threads that share slices are than one: 1.30 to 1.36 measured on 2 cores, since they share
memory's bandwidth and Python's lock."""


def _steps_in_slices(device: Device, optimizer: Optimizer, weight: torch.Tensor) -> float:
    """Measures parameters per second of a step that threads share in slices, from one thread with one slice: the few numbers of
    a probe are too few for two, and took up to 2.3 times as long."""
    threads, shared = torch.get_num_threads(), most_threads() > 1
    torch.set_num_threads(1)
    try:
        return _steps(device, optimizer, weight.view(-1)[: optimizer.at_once]) * (_TWO_THREADS if shared else 1.0)
    finally:
        torch.set_num_threads(threads)


@dataclass(kw_only=True, slots=True)
class Measurements:
    """How plans measure the process and the machine they are made for: a test gives them a machine that is known."""

    runtime: Callable[[Device], int] = measure_runtime
    """Bytes that libraries hold."""
    speeds: Callable[[Device, Optimizer, int, Path, bool, torch.dtype | None], Speeds] = measure_speeds
    disk_probe: int = 64 << 20
    """Bytes that are written and read to measure the disk."""


MEASURED = Measurements()

_MANY = 16
"""Times as many rows with which a GPU's products are measured again, near their full rate."""
_PROBE = 64 << 20
"""Bytes of the copy that measures a link."""
_PROBE_INSIDE = 4 << 20
"""Bytes of the copy that measures the device's memory."""


def _copies(device: Device) -> float:
    """Measures bytes per second of copies within the device's memory."""
    source = torch.ones(_PROBE_INSIDE, dtype=torch.uint8, device=device.torch)
    target = torch.ones_like(source)
    return _PROBE_INSIDE / _seconds(device, partial(target.copy_, source))


def _link(device: Device, way: str) -> float:
    """Measures bytes per second of copies from pinned memory, or into it."""
    host, there = device.host(_PROBE), device.empty(_PROBE)
    source, target = (host, there) if way == UP else (there, host)

    def copy() -> None:
        with device.copying(way):
            device.copy(source, target)
            device.wait(device.mark())

    device.wait(device.mark())
    return _PROBE / _seconds(device, copy)


def speeds_of(hardware: Hardware, autocast: torch.dtype | None = None) -> Speeds:
    """Speeds from a table, at the rate of large products: a row of tokens or pixels is one, and so is a simulated kernel.

    Products in float32 take the rate of TF32 where the program allows that (torch.set_float32_matmul_precision("high")).
    """
    exact = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "float32"
    return Speeds(
        flops=hardware.flops["bfloat16" if autocast is torch.bfloat16 else exact], optimizer=hardware.optimizer,
        host_optimizer=hardware.host_optimizer, read=hardware.disk_read, write=hardware.disk_write,
        up=hardware.h2d, down=hardware.d2h, copy=hardware.memory_bandwidth / 2, half_rate_rows=0,
    )  # fmt: skip


def existing(folder: Path) -> Path:
    """Returns the nearest parent directory that exists, or `folder` itself."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def seconds_of(work: Callable[[], object], repeats: int = 3) -> float:
    """Shortest of `repeats` timings of `work`, in seconds."""
    return min(timeit.repeat(work, number=1, repeat=repeats, timer=time.perf_counter))
