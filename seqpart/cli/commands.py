"""The console script's smaller commands: verify, doctor and report."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from seqpart.cli.arguments import gathered, has_flag, options_of
from seqpart.cli.job import Job, opened, saved_plan, smallest_limit_named
from seqpart.config import Method
from seqpart.device.device import describe_versions, host_memory_free, version_of
from seqpart.device.limit import measure_runtime, warm_up
from seqpart.device.opening import open_device
from seqpart.device.usage import MemoryUsage
from seqpart.errors import OptionError
from seqpart.fields import flag_of
from seqpart.report.page import document
from seqpart.report.page_data import read_run
from seqpart.report.reporter import Reporter
from seqpart.store.atomic import write_text
from seqpart.store.direct import DirectFile, probe_disk
from seqpart.text import refuse_unusable
from seqpart.units import format_size
from seqpart.verify.verification import verify

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
    used = "unused unless --ram-limit grants some"
    if not device.shares_memory:
        used = "half of it is used unless --ram-limit says otherwise"
    rows = {
        "device": device.name,
        "memory": f"{format_size(device.total_memory())}, {format_size(device.free_memory())} free",
        "limit is measured by": usage.source,
        "runtime (counts in every limit)": format_size(runtime),
        "tier " + device.host_tier: f"{format_size(host_memory_free())} free; {used}",
        "tier disk": f"{options.offload_dir.resolve()}: {format_size(shutil.disk_usage(options.offload_dir).free)} free",
        "disk probe, 64 MiB": f"read {read / 1e9:.2f} GB/s, write {write / 1e9:.2f} GB/s, {_cache_use(options.offload_dir)}",
        **describe_versions(),
        **{name: version_of(name) for name in PACKAGES},
    }
    table = Table(title="seqpart doctor", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _cache_use(folder: Path) -> str:
    with DirectFile.unnamed(folder) as file:
        return "around the page cache (O_DIRECT)" if file.direct else "through the page cache (O_DIRECT is refused here)"


@dataclass(frozen=True, kw_only=True)
class VerifyJob(Job):
    """Prove on your own model that training under the limit gives the bits of full training, or name the tensor that differs.

    Some updates are made under --mem-limit, again with a deliberately wrong replay, which must be noticed, and again by
    --reference, which needs the memory of full training. Exit code 0: every bit is the same; 5: not, or the check is blind.
    """

    method: Method = "streamed"
    """Method to verify: streamed, checkpointed, or auto (the one that training would take)."""
    steps: int = 3
    """Number of updates to compare, from the first one on."""
    reference: str = "full"
    """Method to compare with: full, or checkpointed or streamed, which need less memory."""
    sweep: int = 0
    """Number of other plans to compare too, drawn with --seed from all cuts, slots, partitions that stay, graphs that are kept
    or offloaded, places of boundaries, with the heap kept or not."""
    plan: Path | None = None
    """Verify this plan, which --plan-out saved, with the method that it names."""


_NOT_OURS = (
    "resume", "plan_out", "dry_run", "print_schedule", "output_dir", "overwrite", "recovery_epochs", "trace", "log",
)  # fmt: skip


def verified(arguments: Sequence[str]) -> None:
    """`seqpart verify ARGUMENTS`. Raises what `verify` raises."""
    given_arguments = gathered(list(arguments), VerifyJob)
    job = options_of(VerifyJob, given_arguments, "seqpart verify")
    given = [flag_of(name) for name in _NOT_OURS if getattr(job, name)]
    if given:
        raise OptionError(f"{', '.join(given)}: verify trains a few updates and keeps nothing. Leave it out.")
    reporter = Reporter(quiet=job.quiet, flags=True)
    reuse, options = saved_plan(job), job.values()
    if reuse is not None and not has_flag(given_arguments, "--method"):
        options.pop("method")
    with ExitStack() as stack:
        _, trainer, train, test = opened(job, reporter, stack)
        options |= {"weights": trainer.settings.weights, "weights_partial": trainer.settings.weights_partial}
        stack.enter_context(smallest_limit_named(job, trainer, train, test, reuse))
        verify(
            trainer.model, train, steps=job.steps, reference=job.reference, reuse=reuse, sweep=job.sweep, reporter=reporter,
            **options,
        )  # fmt: skip


PAGE = "report.html"


def reported(arguments: Sequence[str]) -> None:
    """Write one HTML page about a run: its plan, memory over time against the limit, losses, where the time went, the proof.

    The run may be finished, under way, interrupted or killed. Raises OptionError for what is no run's directory, StoreError
    where the page cannot be written.
    """
    about = (reported.__doc__ or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(prog="seqpart report", description=about)
    parser.add_argument("directory", type=Path, help="the directory of a run, such as one under runs/")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"where to write it (default: DIR/{PAGE})")
    options = parser.parse_args(arguments)
    page = options.output or options.directory / PAGE
    refuse_unusable("--output", page)
    run = read_run(options.directory)
    if page.is_dir():
        raise OptionError(f"--output: {page} is a directory. Give the name of a file.")
    if not page.parent.is_dir():
        raise OptionError(f"--output: {page.parent} is not a directory. Make it, or give another --output.")
    write_text(page, document(run))
    sys.stdout.write(f"{page}: the run is {run.state_in_words}\n")
    for words in run.missing:
        sys.stdout.write(f"missing: {words}\n")
