"""Reads the directory of a run, also one that is running, ended early, was killed, or is of an older version."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from seqpart.checkpoint.marker import MARKER, latest, lives, marker_of
from seqpart.device.sampler import MEMORY, Proof
from seqpart.errors import OptionError, in_arguments, resuming
from seqpart.files import Folder, opened
from seqpart.plan.plan import Plan
from seqpart.report.reporter import EVENTS, Sum
from seqpart.store.atomic import checked_body
from seqpart.store.scratch import JOB, PLAN, RESULT, has_checkpoint
from seqpart.text import MOST_BYTES, parsed, refuse_unusable

_PHASE = re.compile(r"\[(\w+) (\d+)(?:-(\d+))?(?:\.(\d+))?\]")
_PASSES = 4000
"""Most passes that are kept, more than are drawn: of longer runs every second one is left out, repeatedly."""
_STATES = {
    "done": "finished",
    "interrupted": "interrupted, with a checkpoint",
    "failed": "ended by an error",
    "running": "under way",
    "killed": "killed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One pass over rows that had a loss. `at`: its end, in seconds of the run."""

    kind: str
    where: str
    epoch: int
    at: float
    loss: float
    accuracy: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Memory over time in one process of the run: (seconds of the run, bytes)."""

    points: list[tuple[float, int]]
    limit: int
    source: str


class Result(msgspec.Struct, kw_only=True, rename={"peak_at": "peak at"}):
    """What is shown of a finished run's results, which have more fields."""

    proof: Proof
    accuracy: float | None = None
    test_loss: float | None = None
    average_accuracy: float | None = None
    average_loss: float | None = None
    finished: str = ""
    peak_at: str = ""


@dataclass(slots=True)
class _Process:
    """One process of the run; a resumed run has several. Its seconds continue those of earlier ones."""

    start: dict[str, Any]
    before: float
    seconds: float = 0.0
    steps: dict[str, Sum] = field(default_factory=dict)

    @property
    def began(self) -> float | None:
        """Start of the process in seconds since 1970."""
        try:
            return datetime.fromisoformat(self.start["time"]).timestamp() - float(self.start["seconds"])
        except (KeyError, TypeError, ValueError):  # older versions gave no time
            return None


@dataclass(slots=True)
class _Passes:
    """Passes in order of the log; those logged after the checkpoint that a process resumed from were repeated."""

    kept: list[tuple[int, Pass]] = field(default_factory=list)
    """Each pass with the number of passes before it."""
    count: int = 0
    saved: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of passes logged when the checkpoint of a position was saved; the latest last."""

    def add(self, one: Pass) -> None:
        self.kept.append((self.count, one))
        self.count += 1
        if len(self.kept) > _PASSES:
            del self.kept[1:-1:2]

    def save(self, event: dict[str, Any]) -> None:
        position = int(event["phase"]), int(event["updates"])
        self.saved.pop(position, None)
        self.saved[position] = self.count

    def go_back(self, start: dict[str, Any]) -> None:
        """Called when a process resumes, from the given position, or from the latest, in logs of older versions."""
        at = start.get("checkpoint")
        latest_saved = next(reversed(self.saved.values()), self.count)
        count = self.saved.get((at["phase"], at["updates"]), latest_saved) if at else latest_saved
        self.kept = [(number, one) for number, one in self.kept if number < count]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    root: Path
    state: str
    plan: Plan | None
    result: Result | None
    start: dict[str, Any]
    """The `start` event of the latest process."""
    processes: int
    resumed_at: tuple[float, ...]
    """Seconds of the run at which it was resumed."""
    seconds: float
    """Duration of all processes, as far as logged."""
    passes: tuple[Pass, ...]
    curves: tuple[Curve, ...]
    steps: dict[str, Sum]
    job: dict[str, Any]
    missing: tuple[str, ...]
    """Descriptions of missing data."""

    @property
    def state_in_words(self) -> str:
        return _STATES.get(self.state, self.state)


def read_run(root: Path) -> RecordedRun:
    """Reads the run in `root`. Raises OptionError if that is not the directory of a run."""
    state, missing = _state(root), list[str]()
    events, passes, processes = _events(root, missing), _Passes(), list[_Process]()
    for event in events:
        _take(event, passes, processes)
    if not processes:
        missing.append(f"{EVENTS}: it has no line about the start of the run, so no losses and times are shown")
    curves = _curves(root, processes, missing)
    plan, result, job = _plan(root, missing), _result(root, state, missing), _job(root)
    if not any(process.steps for process in processes):
        why = "is under way and has logged none yet" if state == "running" else "ended before any were logged"
        missing.append(f"seconds by kind of step: the run {why}, or is of an older version")
    if not passes.kept:
        missing.append("losses: no pass is finished yet")
    return RecordedRun(
        root=root, state=state, plan=plan, result=result, start=processes[-1].start if processes else {},
        processes=len(processes), resumed_at=tuple(process.before for process in processes[1:]),
        seconds=sum(process.seconds for process in processes), passes=tuple(one for _, one in passes.kept), curves=curves,
        steps=_together(processes), job=job, missing=tuple(missing),
    )  # fmt: skip


def _state(root: Path) -> str:
    refuse_unusable("report", root)
    if not root.is_dir():
        raise OptionError(f"report: {root} is not a directory. Give the directory of a run, such as one under runs/.")
    with Folder.at(root) as folder:
        try:
            marker = marker_of(folder)
        except ValueError as error:
            raise OptionError(f"report: {root} cannot be identified as the directory of a run: {error} ({MARKER}).") from None
        if marker is None:
            raise OptionError(f"report: {root} is not the directory of a run: it has no {MARKER}. Give one under runs/.")
        if marker.run is not None:
            raise OptionError(f"report: {root} holds the homes and rows of the run in {marker.run}. Give that directory.")
        return "killed" if marker.state == "running" and not lives(folder) else marker.state


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a regular file; the last one may be cut off. Raises OSError."""
    with open(opened(path), "rb") as file:
        yield from file


def _events(root: Path, missing: list[str]) -> Iterator[dict[str, Any]]:
    unread = 0
    try:
        for line in _lines(latest(root, EVENTS)):
            if line.startswith(b'{"event": "step"'):  # one for each coming and going of a partition: their sums are logged too
                continue
            try:
                yield {"seconds": 0.0, **parsed(line)}
            except (ValueError, TypeError):
                unread += line.endswith(b"\n")
    except OSError as error:
        missing.append(f"{EVENTS}: {error.strerror}")
    if unread:
        missing.append(f"{EVENTS}: {unread} line(s) are damaged and were left out")


def _take(event: dict[str, Any], passes: _Passes, processes: list[_Process]) -> None:
    """Takes one line of the log; ignores other kinds and malformed lines."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        if event["event"] == "start":
            before = processes[-1].before + processes[-1].seconds if processes else 0.0
            processes.append(_Process(event, before))
            passes.go_back(event)
        if not processes:
            return
        process = processes[-1]
        process.seconds = max(process.seconds, float(event["seconds"]))
        if event["event"] == "time":
            process.steps = {str(kind): Sum(**found) for kind, found in event["steps"].items()}
        elif event["event"] == "phase":
            passes.add(_pass(event, process.before))
        elif event["event"] == "checkpoint":
            passes.save(event)


def _pass(event: dict[str, Any], before: float) -> Pass:
    match = _PHASE.fullmatch(event["phase"])
    if match is None:
        raise ValueError(event["phase"])
    kind, first, last, _ = match.groups()
    return Pass(
        kind=kind, where=f"partition {first}" if last is None else f"partitions {first}-{last}", epoch=int(event["epoch"]),
        at=before + float(event["seconds"]), loss=float(event["loss"]),
        accuracy=None if event["accuracy"] is None else float(event["accuracy"]),
    )  # fmt: skip


def _together(processes: list[_Process]) -> dict[str, Sum]:
    found: dict[str, Sum] = {}
    for process in processes:
        for kind, one in process.steps.items():
            found.setdefault(kind, Sum()).add(one.seconds, one.bytes_read, one.bytes_written, count=one.count)
    return found


def _curves(root: Path, processes: list[_Process], missing: list[str]) -> tuple[Curve, ...]:
    curves, shift = list[Curve](), 0.0
    try:
        for line in _lines(latest(root, MEMORY)):
            with contextlib.suppress(ValueError, TypeError, KeyError, IndexError):  # the last line may be cut off
                found = parsed(line)
                if isinstance(found, dict):
                    shift = _shift(found, processes)
                    curves.append(Curve(points=[], limit=int(found["limit"]), source=str(found["source"])))
                else:
                    curves[-1].points.append((shift + float(found[0]), int(found[1])))
    except OSError as error:
        missing.append(f"memory over time: {MEMORY}: {error.strerror}. Runs of older versions left none")
    return tuple(curve for curve in curves if curve.points)


def _shift(head: dict[str, Any], processes: list[_Process]) -> float:
    """Returns the seconds of the run at which this curve starts: those of the process that started at about that time."""
    began = datetime.fromisoformat(head["began"]).timestamp()
    known = [(process.began, process.before) for process in processes if process.began is not None]
    at, before = min(known, key=lambda one: abs(one[0] - began), default=(began, 0.0))
    return before + began - at


def _plan(root: Path, missing: list[str]) -> Plan | None:
    try:
        return Plan.from_json(_text(latest(root, PLAN)), PLAN)
    except (OSError, ValueError, OptionError) as error:
        missing.append(f"the plan: {PLAN}: {error.strerror if isinstance(error, OSError) else error}")
        return None


def _result(root: Path, state: str, missing: list[str]) -> Result | None:
    if state == "done":
        try:
            found: Result = msgspec.convert(parsed(_text(root / RESULT)), Result)
            if found.proof.limit <= 0:
                raise ValueError
            return found
        except (OSError, ValueError, msgspec.ValidationError) as error:
            missing.append(f"the results: {RESULT}: {error.strerror if isinstance(error, OSError) else 'it is damaged'}")
            return None
    way = resuming(root)
    way = f"python -m seqpart.train {way}" if latest(root, JOB).exists() else in_arguments(way)  # Python began those without
    cure = f" Resume with: {way}" if has_checkpoint(root) and state != "running" else ""
    missing.append(f"the proof and the final test: the run is {_STATES.get(state, state)}.{cure}")
    return None


def _job(root: Path) -> dict[str, Any]:
    """Returns the command's options; empty for runs from Python."""
    with contextlib.suppress(OSError, ValueError):
        found = checked_body("job", _text(latest(root, JOB)))
        return dict(found) if isinstance(found, dict) else {}
    return {}


def _text(path: Path) -> str:
    with open(opened(path), "rb") as file:
        return file.read(MOST_BYTES).decode()
