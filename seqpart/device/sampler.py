"""Samples memory throughout a run, for the proof in its last line."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from seqpart.device.timeline import Timeline
from seqpart.device.usage import MemoryUsage, read_process
from seqpart.units import format_size


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
        self.told: list[Callable[[int], None]] = [self.timeline.note]
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

    def hold(self, limit: int) -> None:
        """Sets the limit once it is known; it applies to earlier samples too."""
        self.limit = limit
        if self.peak > limit:
            self.violations += 1
            self.violation_label = self.violation_label or self.peak_label or "planning"

    def heed(self, held: int, label: str = "planning") -> None:
        """Adds a measurement from elsewhere, which may fall between two samples."""
        self._tell(held)
        if held > self.peak:
            self.peak, self.peak_label = held, label
        if held > self.limit:
            self.violations += 1
            self.violation_label = self.violation_label or label

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
        self._tell(used)
        if used > self.peak:
            self.peak, self.peak_label = used, self.label()
        if used > self.limit:
            self.violations += 1
            self.violation_label = self.violation_label or self.label()
        return used

    def _tell(self, used: int) -> None:
        for listener in self.told:
            listener(used)

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
    allocator_peak: int | None
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
