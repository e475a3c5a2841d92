"""What one way took: one run's figures, and the medians of several."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from profiling import answer
from profiling.question import Way
from profiling.trace import Ran
from profiling.watching import Watched

POINTS = 1500
"""Points kept of a curve: of the samples that share one, the highest, so that no peak is lost."""


@dataclass(frozen=True)
class Run:
    """One process. Bytes and seconds; None where there is no such figure."""

    way: Way
    status: str
    message: str
    peak: int
    ram: int
    file_pages: int
    seconds: float
    source: str
    disk_read: int
    disk_written: int
    said: dict[str, Any]
    """What the child said of itself."""
    curve: list[tuple[float, int, str]] = field(repr=False)
    """(seconds since the process began, bytes, the step that was running)."""
    steps: list[Ran] = field(repr=False)
    """Their times count from the process's beginning, too."""


def of_run(way: Way, watched: Watched, said: dict[str, Any], steps: list[Ran]) -> Run:
    """`granted` host memory (--ram-limit on the CPU) lies beside the limit, and is not part of the peak. Of a simulated device
    nobody outside the process sees the memory: its own word for the peak stands for all samples."""
    began = watched.samples[0].at if watched.samples else 0.0
    on_host = said.get("granted", 0) if said.get("pinned", 0) == 0 else 0
    used = [max(0, sample.device - on_host) for sample in watched.samples]
    if said.get("simulated"):
        used = [said["inside"]] * len(used)
    lines = [line for line in watched.errors.splitlines() if line.strip()]
    died = f"exit code {watched.exit_code}: {lines[-1] if lines else 'no word'}"
    steps = [Ran(step.began - began, step.ended - began, step.kind, step.label) for step in steps]
    times = [sample.at - began for sample in watched.samples]
    files = [sample.file for sample in watched.samples] or [0]
    return Run(
        way=way, status=said.get("status", "died"), message=said.get("message", "" if said else died),
        peak=max(used, default=0),
        ram=max((sample.ram for sample in watched.samples), default=0), file_pages=max(files), seconds=watched.seconds,
        source=said["source"] if said.get("simulated") else watched.source, disk_read=watched.disk_read,
        disk_written=watched.disk_written, said=said,
        curve=_thinned(list(zip(times, used, _labels(times, steps), strict=True))), steps=steps,
    )  # fmt: skip


def _labels(times: list[float], steps: list[Ran]) -> list[str]:
    labels, at = [], 0
    for time in times:
        while at < len(steps) and steps[at].ended < time:
            at += 1
        labels.append(steps[at].label if at < len(steps) and steps[at].began <= time else "")
    return labels


def _thinned(curve: list[tuple[float, int, str]]) -> list[tuple[float, int, str]]:
    size = -(-len(curve) // POINTS) or 1
    return [max(curve[start : start + size], key=lambda point: point[1]) for start in range(0, len(curve), size)]


@dataclass(frozen=True)
class Figures:
    """One row of the table: the highest peak of all runs of a way, and medians of the times."""

    way: Way
    runs: list[Run]
    facts: dict[str, Any]

    @property
    def limit(self) -> int:
        return int(self.facts["limit"])

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def done(self) -> bool:
        return all(run.status == answer.DONE for run in self.runs)

    @property
    def peak(self) -> int:
        return max(run.peak for run in self.runs)

    @property
    def needs(self) -> int | None:
        """Bytes that it asked for: its peak, and what the allocation that failed would have added."""
        worst = max(self.runs, key=lambda run: run.peak)
        if worst.status == answer.NO_ROOM:
            asked: int | None = worst.said.get("asked")
            return asked
        return worst.peak + (worst.said.get("asked") or 0)

    @property
    def fits(self) -> bool:
        return self.done and self.peak <= self.limit

    def said(self, key: str) -> Any:
        return self.first.said.get(key)

    @property
    def epoch_seconds(self) -> float | None:
        if not self.done:
            return None
        return median(run.said["training_seconds"] for run in self.runs) / self._epochs

    @property
    def samples_per_second(self) -> float | None:
        seconds = self.epoch_seconds
        return self.facts["rows"] / seconds if seconds else None

    @property
    def link_seconds(self) -> dict[str, float]:
        """Seconds of an epoch that each link works at the rate measured alone; the disk reads or writes, a bus does both."""
        facts = self.facts
        disk = self._per_epoch("bytes_read") / facts["read"] + self._per_epoch("bytes_written") / facts["write"]
        buses = {name: self._per_epoch(name) / facts[name] for name in ("to_device", "from_device") if facts[name]}
        return {"disk": disk, **buses}

    def _per_epoch(self, key: str) -> float:
        return float(self.said(key) or 0) / self._epochs

    @property
    def _epochs(self) -> int:
        return max(int(part) for part in str(self.facts["epochs"]).split(","))

    def share_of_bound(self, compute: float) -> float | None:
        """Of the seconds of an epoch, those that nothing could save: plain training's computation, or the busiest link."""
        seconds = self.epoch_seconds
        return max(compute, *self.link_seconds.values()) / seconds if seconds else None

    @property
    def train_loss(self) -> float | None:
        losses = self.said("train_losses")
        return losses[-1] if losses else None


def compute_bound(rows: list[Figures]) -> float:
    """Seconds per epoch of plain training's computation: by the measured matrix rate, or as the fastest run was."""
    seconds = [row.epoch_seconds for row in rows if row.way.plain and row.epoch_seconds]
    return min([rows[0].facts["compute_seconds"], *seconds])
