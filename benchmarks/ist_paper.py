"""Tables 2 and 3 of the IST paper (Yuan et al. 2022) in shape, with what is moved and computed: PNG, JSON, docs/ist_paper.md.

    python -m benchmarks.ist_paper --data-dir DIR              five seeds: 20 minutes on one quiet core
    python -m benchmarks.ist_paper --quick                     every arm on a little noise, to see that it runs; not kept
    python -m benchmarks.ist_paper --table                     docs/ist_paper.md again, of what was found

DIR holds EMNIST47/raw with EMNIST's idx files, and cifar10-subset/train.npz and test.npz with `images` and `labels`. What is
in the JSON already is not run again, but with --again; of what a run that was ended has found, documents can be made.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import ist_arm, ist_figures, quick, record
from benchmarks.ist_figures import LOCAL, LONGER, SUBNETS
from benchmarks.ist_networks import Job, loaded
from benchmarks.objectives.tasks import Rows

RATES = (2e-3, 6e-3, 2e-2)
"""Of Adam, the same for every arm: the one that is best on the validation rows, with two hidden layers, is taken."""
TUNED = 4
"""Subnets with which the rates for CIFAR-10 are chosen."""
SEEDS, FEW = 5, 3
NAME = "ist_paper"
FULL = Job(data="emnist", layers=2, subnets=1, arm="full", lr=0.0, seed=0, rows=10_240, held=2000, epochs=6, width=256)
QUICK = replace(FULL, rows=256, held=64, epochs=2, width=16)


def cells(job: Job) -> Iterator[Job]:
    """A job for each arm, with each number of subnets that it can have."""
    yield replace(job, arm="full", subnets=1)
    yield from (replace(job, arm=arm, subnets=count) for count in SUBNETS for arm in ist_arm.ARMS[1:])


def name_of(job: Job) -> str:
    if job.tuning:
        return f"{job.data} {job.subnets} subnets {job.arm} lr {job.lr}"
    rounds = "" if job.local == FULL.local else f" J {job.local}"
    return f"{job.data} {job.layers} layers {job.subnets} subnets {job.arm}{rounds} seed {job.seed}"


def few(base: Job) -> list[Job]:
    """Every arm once."""
    return [cell for cell in cells(base) if cell.subnets in (1, SUBNETS[0])]


def tuned(base: Job, small: bool) -> Iterator[Job]:
    """On CIFAR-10 with 4 subnets alone, whose rates are taken for 2 and 8, too."""
    for data in ("emnist", *["cifar"] * (not small)):
        for cell in few(base) if small else cells(replace(base, data=data)):
            if data == "cifar" and cell.subnets not in (1, TUNED):
                continue
            yield from (replace(cell, lr=rate, tuning=True, every=base.epochs) for rate in RATES)


def wanted(base: Job, small: bool) -> Iterator[tuple[str, Job]]:
    """(group, run), seed after seed: a run that is ended has found as much of every arm. Rates are chosen later."""
    if small:
        yield from (("runs", cell) for cell in few(base))
        return
    for seed in range(SEEDS):
        for data in ("emnist", "cifar"):
            for layers in (2, 3):
                yield from (("runs", cell) for cell in cells(replace(base, data=data, layers=layers, seed=seed)))
        if seed < FEW:
            yield from (("runs", cell) for cell in cells(replace(base, layers=1, seed=seed)))
            longer = replace(base, subnets=8, seed=seed, epochs=LONGER * base.epochs, every=LONGER * base.every)
            yield from (("longer", replace(longer, arm=arm)) for arm in ("ensemble", "ist zero", "ist keep"))
            rounds = replace(base, subnets=2, arm="ist keep", seed=seed)
            yield from (("rounds", replace(rounds, local=local)) for local in LOCAL)


def best_rate(tuning: dict[str, Any], job: Job) -> float:
    """Of the validation accuracies at the end with two hidden layers."""
    if job.data == "cifar" and job.arm != "full":
        job = replace(job, subnets=TUNED)
    return max(RATES, key=lambda rate: tuning[name_of(replace(job, lr=rate, tuning=True))]["curve"][-1])


def carried_out(data_dir: Path, found: dict[str, dict[str, Any]], base: Job, small: bool) -> None:
    @functools.cache
    def rows(data: str) -> tuple[Rows, Rows, Rows]:
        return loaded(data, data_dir, base.rows, base.held)

    def one(group: str, job: Job, rate: Callable[[], float]) -> None:
        name = name_of(job)
        if name not in found.get(group, {}):
            train, validation, test = rows(job.data)
            told = ist_arm.carried_out(replace(job, lr=rate()), train, validation if job.tuning else test)
            record.note(NAME, found, group, {name: told})
            print(f"{group}: {name}: {100 * told['curve'][-1]:.1f} %, {told['seconds']:.1f} s", flush=True)

    for job in tuned(base, small):
        one("tuning", job, lambda job=job: job.lr)  # type: ignore[misc]
    for group, job in wanted(base, small):
        one(group, job, lambda job=job: best_rate(found["tuning"], job))  # type: ignore[misc]


def main() -> None:
    torch.set_num_threads(1)  # the layers are too small for two
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--table", action="store_true", help="write the document of what was found")
    quick.add_to(parser)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--document", type=Path, help="what tables are put into, with pictures beside it; docs/ist_paper.md")
    options = parser.parse_args()
    quick.need("matplotlib")
    base = QUICK if options.quick else FULL
    if options.data_dir is None and not options.quick and not options.table:
        parser.error("give --data-dir")
    with quick.places(options.quick) as docs:
        found: dict[str, dict[str, Any]] = {} if options.again else record.load(NAME)
        if not options.table:
            data = quick.data(docs / "data") if options.quick else options.data_dir
            carried_out(data, found, base, options.quick)
        made = ist_figures.document(found, base, options.document or docs / "ist_paper.md")
        print(f"{record.path_of(NAME)}; {', '.join(map(str, made))}")


if __name__ == "__main__":
    main()
