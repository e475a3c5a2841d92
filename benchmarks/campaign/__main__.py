"""Random jobs, random faults, and checks that nothing was lost: a campaign that can be run again.

    python -m benchmarks.campaign --minutes 70 --seed 1 --jobs 2      results and docs/trust.md's figures
    python -m benchmarks.campaign --seed 1 --only 37                  case 37 again, with all that it prints
    python -m benchmarks.campaign --minutes 30 --seed 1 --add         another sitting: the next jobs of that seed,
                                                                      and once more what was violated
    python -m benchmarks.campaign --table                             docs/trust.md from the results
    python -m benchmarks.campaign --quick                             a few cases, to see that it runs; not kept

Each job (a model, data, method, optimizer, type, batch, threads, limit) is run undisturbed first, under the smallest limit that
its refusal names or a little more, and held against a plain PyTorch loop; then with faults. A watcher outside samples every
process. Exit code 1 where anything was violated.
"""

import argparse
import dataclasses
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import quick
from benchmarks.campaign import cases, document, faults, jobs, table
from benchmarks.campaign.cases import Record, Worker
from benchmarks.campaign.starting import imports_peak

CHECK_FAILED = "the check failed"
PER_JOB = 8
"""Cases of a job, the undisturbed one included."""


class Campaign:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self._folder = options, folder
        self._library = faults.compiled(folder)
        print("errors of files (ENOSPC, EIO) come from a library that is loaded before the C library, not from a device")
        self._lock, self._next = threading.Lock(), options.first // PER_JOB
        self.records: list[Record] = []
        self.lost: list[str] = []
        self._earlier, self._again = 0.0, list[tuple[int, int | None]]()
        self.mended: list[dict[str, Any]] = []
        if options.add:
            self._go_on()
        self._began = time.monotonic()

    def _go_on(self) -> None:
        """What was violated, or could not be judged, is run again: its cause has been mended since, or it is violated again."""
        self.records, self.lost, self._earlier, self.mended = table.load(self.options.name, self.options.seed)
        self._next = max([self._next, *(record.job + 1 for record in self.records)])
        violated = [record for record in self.records if record.violations]
        self.mended += [{"case": r.case, "fault": r.fault, "violation": r.violations[0]} for r in violated]
        # A job whose undisturbed run was violated has no other cases yet.
        self._again = [(record.job, None if record.fault == "none" else record.case) for record in violated]
        self.records = [record for record in self.records if not record.violations]

    def run(self) -> None:
        threads = [threading.Thread(target=self._guarded_work, args=(number,)) for number in range(self.options.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _guarded_work(self, number: int) -> None:
        try:
            self._work(number)
        except Exception as error:  # the other workers go on, and the exit code tells
            with self._lock:
                self.lost.append(f"worker {number} ended: {type(error).__name__}: {error}")

    def _work(self, number: int) -> None:
        lost: list[str] = []
        with closing(Worker(self._folder / f"desk-{number}", self._library)) as worker:
            for job, only in self._numbers():
                for record in cases_of(worker, self.options.seed, job, faults_of(self.options.faults), self._is_over, only):
                    self._note(record)
            lost = worker.neighbours_go_on()
        with self._lock:
            self.lost += [f"a run beside the cases was lost: {text}" for text in lost]

    def _numbers(self) -> Iterator[tuple[int, int | None]]:
        """(job, the case of it that is wanted, None for all)."""
        while self._again or not self._is_over():
            with self._lock:
                if self._again:
                    found: tuple[int, int | None] = self._again.pop()
                else:
                    found, self._next = (self._next, None), self._next + 1
            yield found

    def _is_over(self) -> bool:
        minutes = (time.monotonic() - self._began) / 60
        enough = self.options.cases is not None and len(self.records) >= self.options.cases
        return enough or (self.options.minutes is not None and minutes >= self.options.minutes)

    def _note(self, record: Record) -> None:
        with self._lock:
            self.records.append(record)
            print(table.line(record), flush=True)
            if len(self.records) % 20 == 0:
                self.save()

    def save(self) -> Path:
        seconds = round(self._earlier + time.monotonic() - self._began)
        about = {
            "seed": self.options.seed, "jobs": self.options.jobs, "per_job": PER_JOB, "seconds": seconds,
            "device_mapper": document.has_device_mapper(), "imports": imports_peak(), "mended": self.mended,
        }  # fmt: skip
        return table.save(self.options.name, self.records, self.lost, about)


def faults_of(names: str | None) -> list[str] | None:
    if names is None:
        return None
    chosen = names.split(",")
    unknown = [name for name in chosen if name not in faults.KINDS]
    if unknown:
        sys.exit(f"--faults: unknown {', '.join(unknown)}; expected some of {', '.join(faults.KINDS)}")
    return chosen


def cases_of(
    worker: Worker, seed: int, number: int, kinds: list[str] | None, over: Any, only: int | None = None
) -> Iterator[Record]:
    """The cases of one job, in turn: the undisturbed run, and its faults. With `only` that one alone is yielded."""
    job = jobs.draw(seed, number)
    record = Record(number * PER_JOB, number, "none", list(job.options), traits=list(job.traits))
    base = guarded(record, lambda: worker.settle(job, record))
    if only in (None, record.case):
        yield record
    for case in range(number * PER_JOB + 1, (number + 1) * PER_JOB):
        if base is None or (over() and only is None):
            return
        if only not in (None, case):
            continue
        fault = faults.draw(Random(f"{seed} case {case}"), kinds)
        start = cases.drawn_start(seed, case, fault)
        found = Record(case, number, fault.kind, record.arguments, start, traits=record.traits)
        guarded(found, lambda fault=fault, found=found: worker.carry_out(base, fault, found))
        yield found


def guarded(record: Record, work: Any) -> Any:
    """A checker that stumbles is a violation to look at, not the campaign's end."""
    try:
        return work()
    except Exception as error:
        record.outcome = CHECK_FAILED
        record.violations.append(f"check: {type(error).__name__}: {error}")
        return None


def replay(options: argparse.Namespace, folder: Path) -> int:
    number, found = options.only // PER_JOB, False
    with closing(Worker(folder / "desk", faults.compiled(folder), show=True)) as worker:
        for record in cases_of(worker, options.seed, number, faults_of(options.faults), lambda: False, options.only):
            print(json.dumps(dataclasses.asdict(record), indent=1))
            print(table.line(record))
            found = found or bool(record.violations)
    return int(found)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="start no further case after so long")
    parser.add_argument("--cases", type=int, help="start no further job after so many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time. Default: 2")
    parser.add_argument("--first", type=int, default=0, help="begin at the job of this case")
    parser.add_argument("--faults", help="only these, with commas between them")
    parser.add_argument("--only", type=int, help="this case alone, with all that it prints")
    parser.add_argument("--folder", type=Path, help="where the runs lie. Default: the system's directory for temporary files")
    parser.add_argument("--add", action="store_true", help="go on from the results that are there, with the next job")
    parser.add_argument("--name", default="campaign", help="of the results. Default: campaign")
    parser.add_argument("--table", action="store_true", help="write docs/trust.md from the results, and run nothing")
    quick.add_to(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.cases, options.jobs, options.seed, options.faults = 2, 1, 5, "torn write"
    if not options.table and options.only is None and options.minutes is None and options.cases is None:
        parser.error("give --minutes, --cases, --only or --table")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.table:
        print(f"written to {document.write(options.name)}")
        return 0
    # Started in the background or by nohup it would ignore them, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    folder = Path(tempfile.mkdtemp(prefix="campaign-", dir=options.folder)).resolve()
    try:
        if options.only is not None:
            return replay(options, folder)
        with quick.places(options.quick):
            campaign = Campaign(options, folder)
            campaign.run()
            path = campaign.save()
        print(table.summary(campaign.records, campaign.lost))
        print(f"written to {path}")
        return int(bool(campaign.lost) or any(record.violations for record in campaign.records))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
