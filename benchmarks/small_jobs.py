"""Small jobs, whose steps take a millisecond or five: an epoch against a plain PyTorch loop, and what a command takes to start.

    python -m benchmarks.small_jobs                    both, 3 minutes
    python -m benchmarks.small_jobs epochs --rounds 9  one of them
    python -m benchmarks.small_jobs epochs --quick     a round of a job against one loop, to see that it runs; not kept

right    the second partition of the PNN paper's network by `sil`: 93,785 rows of 60 floats, batch 1410 (EMNIST's shape, random)
digits   `full` on a small MLP: 1,797 rows of 64 floats, batch 64
start    `python -m seqpart.train --mem-limit 2GB --dry-run` and `seqpart --help` against `python -c "import torch"`

The plain loop has the same layers, optimizer, batch and shuffling, all rows in memory, PyTorch's own process settings, and sums
up no losses; once more with OpenMP threads that spin for microseconds and then sleep, as seqpart's do. Each is asked for an
epoch in turn, the ratios are of medians, and processor seconds stand beside those of the clock: on a busy machine these say
more. Both once more on one thread: what a step costs beside its kernels, whatever threads do while they wait.
"""

import argparse
import functools
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import quick
from benchmarks.children import InTurn, answer, own_settings, wait

_ONE = {"OMP_NUM_THREADS": "1"}
ARMS: dict[str, dict[str, str]] = {
    "seqpart": {}, "plain": {}, "plain-same": {"GOMP_SPINCOUNT": "1000"}, "seqpart-one": _ONE, "plain-one": _ONE,
}  # fmt: skip
"""What of PyTorch's own process settings is changed."""
AGAINST = {"plain": "seqpart", "plain-same": "seqpart", "plain-one": "seqpart-one"}
WARM = 2
"""Epochs that are not counted."""
QUICK = {"right": ("seqpart", "plain")}
"""Jobs and arms of the quick form, which takes two updates for an epoch."""


@dataclass(frozen=True, kw_only=True)
class Job:
    rows: int
    shape: tuple[int, ...]
    """Of one row of the data."""
    widths: tuple[int, ...]
    """Of the linear layers; the first number is that of the inputs."""
    cut: int
    """The first layer of the partition that is timed."""
    options: dict[str, Any]


JOBS = {
    "right": Job(
        rows=93_785, shape=(1, 28, 28), widths=(784, 80, 60, 60, 60, 47), cut=2,
        options={"method": "sil", "partitions": (0, 2), "batch_size": 1410, "optimizer": "sgd", "momentum": 0.9, "lr": 0.01},
    ),
    "digits": Job(
        rows=1_797, shape=(64,), widths=(64, 256, 256, 10), cut=0,
        options={"method": "full", "batch_size": 64, "optimizer": "adam", "lr": 1e-3},
    ),
}  # fmt: skip


def job_named(name: str, few: bool) -> Job:
    return replace(JOBS[name], rows=2 * JOBS[name].options["batch_size"]) if few else JOBS[name]


class Taken:
    """Seconds of the clock and of the processors since it was made."""

    def __init__(self) -> None:
        self._clock, self._processor = time.perf_counter(), time.process_time()

    def so_far(self) -> list[float]:
        return [time.perf_counter() - self._clock, time.process_time() - self._processor]


def layers(job: Job) -> Iterator[Any]:
    """Factories of the blocks: linear layers with a ReLU behind all but the last."""
    from torch import nn

    def block(inputs: int, outputs: int) -> nn.Module:
        linear = nn.Linear(inputs, outputs)
        return linear if outputs == job.widths[-1] else nn.Sequential(nn.Flatten(), linear, nn.ReLU())

    for inputs, outputs in zip(job.widths, job.widths[1:], strict=False):
        yield functools.partial(block, inputs, outputs)


def seqpart_worker(job: Job, epochs: int, folder: Path) -> None:
    from seqpart.launch import prepare

    prepare()  # before torch: the settings of the command
    import torch

    from seqpart import Trainer
    from seqpart.report.reporter import Reporter
    from seqpart.schedule.phase import PhaseKind
    from seqpart.schedule.steps import PhaseBegun, PhaseDone

    timed = 1 if job.cut else 0

    class Alternating(Reporter):
        """Answers behind each timed epoch, and waits for a word before the next."""

        def listen(self, event: object) -> None:
            if not isinstance(event, PhaseBegun | PhaseDone):
                return
            phase = event.phase
            if phase.kind is not PhaseKind.TRAIN or phase.partition != timed:
                return
            if isinstance(event, PhaseDone):
                answer(self.taken.so_far())
            if isinstance(event, PhaseDone) or phase.epoch == 1:
                wait()
                self.taken = Taken()

    x, y = torch.rand(job.rows, *job.shape), torch.arange(job.rows) % job.widths[-1]
    Trainer(
        list(layers(job)), mem_limit="2GB", epochs=(1, epochs) if timed else epochs, output_dir=folder, quiet=True,
        **job.options,
    ).fit((x, y), (x[:1000], y[:1000]), reporter=Alternating(quiet=True))  # fmt: skip


def plain_worker(job: Job, epochs: int) -> None:
    import torch
    import torch.nn.functional as F

    model = torch.nn.Sequential(*[made() for made in layers(job)][job.cut :])
    x, y = torch.rand(job.rows, job.widths[job.cut]), torch.arange(job.rows) % job.widths[-1]
    options = {"lr": job.options["lr"], "fused": True}
    if job.options["optimizer"] == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), momentum=job.options["momentum"], **options)
    else:
        optimizer = torch.optim.Adam(model.parameters(), **options)
    for _ in range(epochs):
        wait()
        taken = Taken()
        for rows in torch.randperm(job.rows).split(job.options["batch_size"]):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        answer(taken.so_far())


def epochs_of(name: str, rounds: int, folder: Path, few: bool) -> dict[str, Any]:
    count, wanted = rounds + WARM, QUICK[name] if few else ARMS
    with tempfile.TemporaryDirectory(dir=folder) as place:
        words = [name, *["--quick"] * few, "--rounds", str(count), "--folder"]
        arms = {
            arm: InTurn(__spec__.name, ["--arm", arm, *words, f"{place}/{arm}"], own_settings() | more)
            for arm, more in ARMS.items()
            if arm in wanted
        }
        seen: dict[str, list[list[float]]] = {arm: [] for arm in arms}
        for turn in range(count):
            for arm in list(arms)[:: 1 if turn % 2 else -1]:
                seen[arm].append(arms[arm].turn())
        for running in arms.values():
            running.end()
    return medians(seen, WARM)


def medians(seen: dict[str, list[list[float]]], left_out: int) -> dict[str, Any]:
    """seen: of each arm its pairs of seconds of the clock and of the processors, the first `left_out` of which do not count."""
    seconds, processor = (
        {arm: statistics.median(pair[which] for pair in pairs[left_out:]) for arm, pairs in seen.items()} for which in (0, 1)
    )
    return {"seconds": seconds, "processor_seconds": processor, "all": seen}


COMMANDS = {
    "import torch": ["-c", "import torch"],
    "--dry-run": ["-m", "seqpart.train", "--mem-limit", "2GB", "--dry-run"],
    "--help": ["-m", "seqpart", "--help"],
}


def start(rounds: int) -> dict[str, Any]:
    seen: dict[str, list[list[float]]] = {name: [] for name in COMMANDS}
    for turn in range(rounds + 1):
        for name in list(COMMANDS)[:: 1 if turn % 2 else -1]:
            began, before = time.perf_counter(), _of_children()
            subprocess.run([sys.executable, *COMMANDS[name]], check=True, capture_output=True, env=own_settings())
            seen[name].append([time.perf_counter() - began, _of_children() - before])
    return medians(seen, 1)


def _of_children() -> float:
    """Processor seconds of all programs that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tell(found: dict[str, Any]) -> None:
    for name in JOBS:
        if one := found.get(name):
            seconds, processor = one["seconds"], one["processor_seconds"]
            print(f"epoch of {name}: {1e3 * seconds['seqpart']:.1f} ms, {1e3 * processor['seqpart']:.1f} of the processors")
            for arm, ours in AGAINST.items():
                if arm not in seconds:
                    continue
                ratio, of_processor = (kind[ours] / kind[arm] for kind in (seconds, processor))
                print(f"  {arm:<16}{1e3 * seconds[arm]:8.1f} ms  ratio {ratio:.2f}, of processor seconds {of_processor:.2f}")
    if "start" in found:
        seconds, processor = found["start"]["seconds"], found["start"]["processor_seconds"]
        for name in COMMANDS:
            ratio, of_processor = (kind[name] / kind["import torch"] for kind in (seconds, processor))
            print(f"start of {name:<14}{seconds[name]:6.2f} s  ratio {ratio:.2f}, of processor seconds {of_processor:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["all", "epochs", "start", *JOBS], default="all")
    parser.add_argument("--rounds", type=int, default=21, help="of epochs; commands are started a third as often")
    parser.add_argument("--folder", type=Path, default=Path(), help="where homes and rows lie: a real disk")
    parser.add_argument("--arm", choices=list(ARMS), help=argparse.SUPPRESS)
    quick.add_to(parser)
    options = parser.parse_args()
    if options.arm in AGAINST.values():
        return seqpart_worker(job_named(options.part, options.quick), options.rounds, options.folder)
    if options.arm:
        return plain_worker(job_named(options.part, options.quick), options.rounds)
    from benchmarks.record import load, save

    found: dict[str, Any] = {}
    for name in QUICK if options.quick else JOBS:
        if options.part in ("all", "epochs", name):
            found[name] = epochs_of(name, 1 if options.quick else options.rounds, options.folder, options.quick)
    if options.part in ("all", "start"):
        found["start"] = start(1 if options.quick else max(3, options.rounds // 3))
    tell(found)
    with quick.places(options.quick):
        print(f"written to {save('small-jobs', load('small-jobs') | found)}")
    return None


if __name__ == "__main__":
    main()
