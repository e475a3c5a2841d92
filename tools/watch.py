"""Run a command and watch its memory from outside: the peak of RssAnon + RssShmem over its whole process tree.

    python tools/watch.py -- python -m seqpart.train --mem-limit 2GB

Independent of seqpart on purpose: it shares no code with what it checks. Prints one JSON line to standard error.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Watched:
    exit_code: int
    peak: int
    """Bytes of RssAnon + RssShmem, the tree's sum at its highest sample."""
    peak_file: int
    """Bytes of RssFile at its highest sample."""
    samples: int
    seconds: float


class Process(Protocol):
    """What is watched: a subprocess.Popen, or one like it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...


def watch(command: list[str], interval: float = 0.01, **popen: object) -> Watched:
    """Run `command` to its end, sampling every `interval` seconds from its first moment."""
    return watch_process(subprocess.Popen(command, **popen), interval)  # type: ignore[call-overload]


def watch_process(process: Process, interval: float = 0.01, at_sample: Callable[[float], object] | None = None) -> Watched:
    """The same of a process that has just started. `at_sample` is called with the seconds so far, and may disturb it."""
    began = time.perf_counter()
    peak = peak_file = samples = 0
    while process.poll() is None:
        anon, file = tree(process.pid, {process.pid: None})
        peak, peak_file, samples = max(peak, anon), max(peak_file, file), samples + 1
        if at_sample is not None:
            at_sample(time.perf_counter() - began)
        time.sleep(interval)
    assert process.returncode is not None
    return Watched(process.returncode, peak, peak_file, samples, round(time.perf_counter() - began, 2))


def tree(pid: int, seen: dict[int, None]) -> tuple[int, int]:
    """(RssAnon + RssShmem, RssFile) of a process and its descendants, in bytes."""
    anon, file = status(pid)
    for child in children_of(pid):
        if child not in seen and not shares_memory(pid, child):
            seen[child] = None
            more = tree(child, seen)
            anon, file = anon + more[0], file + more[1]
    return anon, file


def children_of(pid: int) -> list[int]:
    """Of all its threads; none where it has gone in the meantime."""
    found = []
    try:
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # of a thread that has ended
                found += [int(child) for child in listing.read_text().split()]
    except OSError:
        pass
    return found


def shares_memory(pid: int, child: int) -> bool:
    """Between vfork and exec a child runs in its parent's memory, and /proc shows the same bytes for both."""
    try:
        # proc(5): vsize, rss, rsslim, startcode, endcode, startstack
        one, other = (Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[20:26] for number in (pid, child))
    except OSError:
        return False
    return one == other


def status(pid: int) -> tuple[int, int]:
    """The same of one process alone; zeros when it is gone."""
    found = {"RssAnon": 0, "RssShmem": 0, "RssFile": 0}
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in found:
                found[key] = int(value.split()[0]) * 1024
    except OSError:
        return 0, 0
    return found["RssAnon"] + found["RssShmem"], found["RssFile"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=float, default=0.01, help="seconds between samples")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("give a command after --")
    watched = watch(command, options.interval)
    print(json.dumps(watched.__dict__), file=sys.stderr)
    return watched.exit_code


if __name__ == "__main__":
    sys.exit(main())
