"""`seqpart doctor`: what this machine offers, measured. The first thing to attach to a bug report."""

import argparse
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from seqpart.device.device import describe_versions, host_memory_free
from seqpart.device.limit import measure_runtime, warm_up
from seqpart.device.opening import open_device
from seqpart.device.usage import MemoryUsage
from seqpart.errors import OptionError
from seqpart.store.direct import DirectFile, probe_disk
from seqpart.units import format_size

PACKAGES = ("torchvision", "numpy", "psutil", "nvidia-ml-py", "ptflops", "safetensors", "rich", "tyro", "scikit-learn")


def doctor(arguments: Sequence[str]) -> None:
    """Print device, limits, tiers, disk speed and versions. Raises OptionError or StoreError for a bad option."""
    parser = argparse.ArgumentParser(prog="seqpart doctor", description=doctor.__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N, sim or sim:CARD")
    parser.add_argument("--offload-dir", type=Path, default=Path(), help="directory whose disk to probe (default: here)")
    options = parser.parse_args(arguments)
    if not options.offload_dir.is_dir():
        raise OptionError(f"--offload-dir: expected a directory; {options.offload_dir} is none.")
    device = open_device(options.device)
    with device.running():
        warm_up(device)
        runtime = measure_runtime(device)
    usage = MemoryUsage(device)
    read, write = probe_disk(options.offload_dir)
    rows = {
        "device": device.name,
        "memory": f"{format_size(device.total_memory())}, {format_size(device.free_memory())} free",
        "limit is measured by": usage.source,
        "runtime (counts in every limit)": format_size(runtime),
        "tier " + device.host_tier: _host_tier(shared=device.shares_memory),
        "tier disk": f"{options.offload_dir.resolve()}: {format_size(shutil.disk_usage(options.offload_dir).free)} free",
        "disk probe, 64 MiB": f"read {read / 1e9:.2f} GB/s, write {write / 1e9:.2f} GB/s, {_cache_use(options.offload_dir)}",
        **describe_versions(),
        **{name: _version(name) for name in PACKAGES},
    }
    table = Table(title="seqpart doctor", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _host_tier(*, shared: bool) -> str:
    free = format_size(host_memory_free())
    return (
        f"{free} free; unused unless --ram-limit grants some"
        if shared
        else f"{free} free; half of it is used unless --ram-limit says otherwise"
    )


def _cache_use(folder: Path) -> str:
    with DirectFile.unnamed(folder) as file:
        return "around the page cache (O_DIRECT)" if file.direct else "through the page cache (O_DIRECT is refused here)"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
