"""Samples memory throughout a run, for the proof in its last line and the timeline in its directory."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from seqpart.device.usage import MemoryUsage, read_process
from seqpart.files import added_to, made, write_all
from seqpart.units import format_size

MEMORY = "memory.jsonl"
_FIRST = 0.05
"""Seconds that a point stands for, at first."""
_POINTS = 512
"""Points after which each stands for twice the time: 6,000 in a week."""


class Timeline:
    """A log of memory samples, from any thread."""

    def __init__(self) -> None:
        self.began, self._start = datetime.now(UTC), time.monotonic()
        self._every, self._count, self._next, self._highest = _FIRST, 0, 0.0, 0
        self._kept: list[str] = []
        """Lines not yet in a file."""
        self._file: int | None = None
        self._lock = threading.Lock()

    def note(self, used: int) -> None:
        """Adds a sample: `used` bytes are held now."""
        with self._lock:
            self._highest = max(self._highest, used)
            now = time.monotonic() - self._start
            if now >= self._next:
                self._point(now)

    def _point(self, now: float) -> None:
        self._kept.append(f"[{now:.3f}, {self._highest}]\n")
        self._highest, self._next, self._count = 0, now + self._every, self._count + 1
        if self._count % _POINTS == 0:
            self._every *= 2
        if self._file is not None:
            self._write()

    def leave(self, path: Path, *, limit: int, source: str, add: bool) -> None:
        """Writes points so far, and later ones, to the file `path`; with `add` after those of the run that is resumed."""
        head = {"began": self.began.isoformat(timespec="milliseconds"), "limit": limit, "source": source}
        with self._lock:
            try:
                self._file = added_to(path) if add else made(path, 0o666, flags=os.O_APPEND)
            except OSError:  # the log beside it says why
                return
            self._kept.insert(0, json.dumps(head) + "\n")
            self._write()

    def _write(self) -> None:
        assert self._file is not None
        lines, self._kept = "".join(self._kept), []
        try:
            write_all(self._file, lines.encode())
        except OSError:  # a full disk ends the run where that matters; the proof does not need this file
            self._let_go()

    def close(self) -> None:
        with self._lock:
            if self._file is None:
                return
            if self._highest:
                self._point(time.monotonic() - self._start)
            self._let_go()

    def _let_go(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None


class Sampler:
    """A thread that reads the memory usage every `interval` seconds, and remembers the peak and what was running then."""

    def __init__(self, usage: MemoryUsage, limit: int, interval: float = 0.01) -> None:
        self.usage, self.limit, self.interval = usage, limit, interval
        self.label: Callable[[], str] = lambda: ""
        self.peak = self.violations = self.samples = 0
        self.peak_label = self.violation_label = ""
        self.file_growth = 0
        self.known = 0
        """The peak when the plan was made: the prediction does not cover earlier ones."""
        self.timeline = Timeline()
        self.listeners: list[Callable[[int], None]] = [self.timeline.note]
        """Functions called with the bytes of every sample, mostly by the sampler's thread."""
        self._file_start = read_process().file
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="seqpart-sampler", daemon=True)

    def start(self) -> None:
        if self._thread.is_alive():
            return
        self.usage.watch()
        self.sample()
        self._thread.start()

    def set_limit(self, limit: int) -> None:
        """Sets the limit once it is known; it applies to earlier samples too."""
        self.limit = limit
        if self.peak > limit:
            self.violations += 1
            self.violation_label = self.violation_label or self.peak_label or "planning"

    def add_reading(self, held: int, label: str = "planning") -> None:
        """Adds a measurement from elsewhere, which may fall between two samples."""
        self._add(held, lambda: label)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.sample()
        self._look_at_files()
        self.timeline.close()

    def sample(self) -> int:
        used = self.usage.read()
        self.samples += 1
        self._add(used, self.label)
        return used

    def _add(self, used: int, label: Callable[[], str]) -> None:
        for listener in self.listeners:
            listener(used)
        if used > self.peak:
            self.peak, self.peak_label = used, label()
        if used > self.limit:
            self.violations += 1
            self.violation_label = self.violation_label or label()

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self.sample()
            if self.samples % 20 == 0:
                self._look_at_files()

    def _look_at_files(self) -> None:
        self.file_growth = max(self.file_growth, read_process().file - self._file_start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The last line of every run."""

    limit: int
    peak: int
    source: str
    predicted: int
    runtime: int
    """Bytes that the imported libraries (CPU) or the context (CUDA) took before any training."""
    allocator_peak: int | None = None
    host: int
    """Bytes of host memory granted beside the limit, not part of the peak."""
    file_growth: int
    samples: int
    violations: int

    def and_then(self, other: "Proof") -> "Proof":
        """The proof of both runs, one after the other in one process, under the same limit."""
        allocator = [peak for peak in (self.allocator_peak, other.allocator_peak) if peak is not None]
        return replace(
            self, peak=max(self.peak, other.peak), predicted=max(self.predicted, other.predicted),
            allocator_peak=max(allocator, default=None), file_growth=max(self.file_growth, other.file_growth),
            samples=self.samples + other.samples, violations=self.violations + other.violations,
        )  # fmt: skip

    def __str__(self) -> str:
        allocator = f", allocator peak {format_size(self.allocator_peak)}" if self.allocator_peak is not None else ""
        host = f" with {format_size(self.host)} of host memory beside it" if self.host else ""
        return (
            f"proof: limit {format_size(self.limit)}{host}, measured peak {format_size(self.peak)} ({self.source}, "
            f"{self.samples} samples), predicted {format_size(self.predicted)}{allocator}, "
            f"of it runtime {format_size(self.runtime)}; file pages grew {format_size(self.file_growth)}; "
            f"violations {self.violations}"
        )
