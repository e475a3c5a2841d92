"""Prints a run's progress and writes its log. Messages go to the logger `seqpart`; only this package prints, and only those
that no handler of the user's takes.

On a terminal a live bar with ETA, samples/s and the peak against the limit; elsewhere plain lines. Every event is
also one line of JSON in the run directory.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Column

from seqpart.callbacks import MetricValue
from seqpart.device.sampler import Proof
from seqpart.errors import SeqpartError, in_arguments
from seqpart.files import added_to, made
from seqpart.plan.plan import Plan, as_text_rows
from seqpart.report import terminal
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import counted
from seqpart.schedule.steps import Event, PhaseBegun, PhaseDone, Position, StepDone, Verb
from seqpart.store.direct import explaining
from seqpart.units import format_seconds, format_size

_SECONDS = 10.0
"""Seconds between two writes of the sums to the log, at the end of a step."""


@dataclass(slots=True)
class Sum:
    count: int = 0
    seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0

    def add(self, seconds: float, bytes_read: int, bytes_written: int, *, count: int = 1) -> None:
        self.count += count
        self.seconds += seconds
        self.bytes_read += bytes_read
        self.bytes_written += bytes_written


EVENTS = "events.jsonl"

_WHAT = {
    PhaseKind.TRAIN: "train", PhaseKind.CACHE: "cache outputs", PhaseKind.DRAW: "draw inputs", PhaseKind.TEST: "test",
    PhaseKind.STATISTICS: "statistics",
}  # fmt: skip


_STEPS = 10_000
"""Most LOAD and DROP steps that a process logs one by one, 1.2 MB; sums continue."""
_SHOWN_EVERY = 0.2
"""Seconds between two updates of the live line."""


class Reporter:
    """Prints to `console` unless `quiet`; writes `events.jsonl` once `open_log` has been called.

    flags: messages name command-line flags instead of Python arguments.
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None, flags: bool = False) -> None:
        self.console, self._flags = console or _console(quiet), flags
        self._log: IO[str] | None = None
        self._log_path = Path(EVENTS)
        self._bar: _Bar | None = None
        self._began, self._steps = time.perf_counter(), 0
        self._sums: dict[str, Sum] = {}
        """Time and traffic of this process by kind of step."""
        self._last_written, self._changed = time.monotonic(), False

    def open_log(self, path: Path, *, add: bool = False) -> None:
        """Writes events to `path`; with `add`, after those of the resumed run."""
        with explaining(path):
            self._log = open(added_to(path) if add else made(path, 0o666), "w")  # noqa: SIM115 (closed by close)
        self._log_path = path

    def record(self, kind: str, **values: Any) -> None:
        """Writes one JSON line, flushed, so that a killed run leaves it."""
        if self._log is not None:
            seconds = round(time.perf_counter() - self._began, 3)
            with explaining(self._log_path):
                self._log.write(json.dumps({"event": kind, "seconds": seconds, **values}) + "\n")
                self._log.flush()

    def add_note(self, error: Exception, note: str) -> None:
        """Adds a note to an error, with flags or Python arguments."""
        error.add_note(note if isinstance(error, SeqpartError) else self._worded(note))

    def _worded(self, text: str) -> str:
        return text if self._flags else in_arguments(text)

    def say(self, text: str, level: int = logging.INFO) -> None:
        text = self._worded(text)
        terminal.LOGGER.log(level, "%s", text)
        if not terminal.is_heard(level):
            width = terminal.width_of(self.console)
            self.console.print(text if width is None else terminal.wrapped(text, width), markup=False)

    def warn(self, text: str) -> None:
        self.say(text, logging.WARNING)

    def plan(self, plan: Plan) -> None:
        rows, width = as_text_rows(plan), terminal.width_for_table(self.console)
        table, left_out = terminal.plan_table(rows, width)
        self.say(plan_title(plan))
        if terminal.is_heard(logging.INFO):
            terminal.LOGGER.info("%s", terminal.as_lines(terminal.plan_table(rows, None)[0]))
            left_out = ()
        else:
            self.console.width = width or terminal.UNLIMITED
            self.console.print(table)
        if left_out:
            self.say(f"left out, for a wider terminal: {', '.join(left_out)}")
        for line in plan_notes(plan):
            self.say(line)

    def begin(self, phases: Sequence[Phase], start: Position, limit: int, used: Callable[[], int]) -> None:
        """Called at the start of the loop. used: the peak so far, in bytes."""
        if self.console.is_terminal and not self.console.quiet:
            self._bar = _Bar(self.console, phases, start, limit, used)

    def listen(self, event: Event) -> None:
        if isinstance(event, StepDone):
            if self._bar is not None:
                self._bar.step(event)
            own = self._sums.setdefault(event.step.verb.name.lower(), Sum())
            own.add(event.seconds, event.bytes_read, event.bytes_written)
            self._changed = True
            self._write_time()
            if event.step.verb in (Verb.LOAD, Verb.DROP) and self._steps < _STEPS:
                self._steps += 1
                self.record(
                    "step", step=str(event.step), bytes_read=event.bytes_read, bytes_written=event.bytes_written,
                    took=round(event.seconds, 4),
                )  # fmt: skip
        elif isinstance(event, PhaseBegun):
            if self._bar is not None:
                self._bar.enter(event)
        else:
            self._phase_done(event)

    def _write_time(self, after: float = _SECONDS) -> None:
        """Logs the sums so far, if they have changed and the last time was more than `after` seconds ago."""
        if self._log is not None and self._changed and time.monotonic() - self._last_written > after:
            self._last_written, self._changed = time.monotonic(), False
            sums = {kind: {**asdict(found), "seconds": round(found.seconds, 4)} for kind, found in self._sums.items()}
            self.record("time", steps=sums)

    def _phase_done(self, event: PhaseDone) -> None:
        if event.loss is None:  # nothing but rows for the next partition
            return
        phase = event.phase
        speed = event.rows_per_second
        self.record(
            "phase", phase=str(phase), partition=phase.partition, epoch=phase.epoch, loss=event.loss,
            accuracy=event.accuracy, metrics=dict(event.metrics), rows=event.rows, took=round(event.seconds, 3),
            samples_per_second=round(speed, 1),
        )  # fmt: skip
        if phase.is_turn and phase.epochs_done != phase.epoch:  # of an epoch the last is shown
            return
        epoch = f" epoch {_share(phase.epochs_done)}" if phase.kind is PhaseKind.TRAIN else ""
        accuracy = "" if event.accuracy is None else f"  accuracy {100 * event.accuracy:6.2f} %"
        short = f"{_spellings(phase)[-1]} loss {event.loss:.4f}"
        parts = (
            f"{_who(phase)} {_WHAT[phase.kind] + epoch:<15} loss {event.loss:8.4f}", accuracy, f"  {event.seconds:6.1f} s",
            f"  {speed:8.0f} samples/s", *(f"  {name} {number:.4f}" for name, number in single(event.metrics).items()),
        )  # fmt: skip
        self.say(terminal.as_many(parts, terminal.width_of(self.console), short=short))

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._write_time(after=0.0)

    def proof(self, proof: Proof) -> None:
        self.say(str(proof))

    def close(self) -> None:
        self.end()
        if self._log is not None:
            # What could not be written was reported by `record` already, and closing would try once more.
            with suppress(OSError):
                self._log.close()
            self._log = None


class WarningsAlone(Reporter):
    """Reporter for an evaluation or a user's own loop: only warnings, since the caller reports results."""

    def __init__(self) -> None:
        super().__init__(quiet=True)

    def say(self, text: str, level: int = logging.INFO) -> None:
        if level >= logging.WARNING:
            super().say(text, level)

    def plan(self, plan: Plan) -> None:
        pass


def single(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, float)}


def _console(quiet: bool) -> Console:
    # emoji: their names, which nobody writes here, would take 0.8 MB of the limit.
    return Console(quiet=quiet, emoji=False, highlight=False, soft_wrap=True, file=terminal.standard_output())


def _who(phase: Phase) -> str:
    return f"partition {phase.partition}" if phase.through is None else f"partitions {phase.partition}-{phase.through}"


def _spellings(phase: Phase) -> tuple[str, ...]:
    """Returns names of a pass, ever shorter: `partitions 0-3 train epoch 2`, `p0-3 train 2`, `p0-3 e2`."""
    who, what = _who(phase), _WHAT[phase.kind]
    where = f"p{who.split()[-1]}"
    if phase.kind is not PhaseKind.TRAIN:
        return f"{who} {what}", f"{where} {what}"
    return f"{who} {what} epoch {phase.epoch}", f"{where} {what} {phase.epoch}", f"{where} e{phase.epoch}"


def figures(loss: float, accuracy: float | None, metrics: Mapping[str, MetricValue], of: str = "") -> str:
    """Formats loss, accuracy and metrics; `of` comes before loss and accuracy."""
    share = "" if accuracy is None else f"{of}accuracy {100 * accuracy:.2f} %, "
    more = "".join(f", {name} {value:.4f}" for name, value in single(metrics).items())
    return f"{share}{of}loss {loss:.4f}{more}"


def _share(epochs: float) -> str:
    """Formats a number of epochs: 3, or 2.75 within one."""
    return f"{epochs:.2f}".rstrip("0").rstrip(".")


def _passes(phase: Phase) -> int:
    """Returns the work in forward passes; a backward pass counts as two, so that the bar's ETA is right."""
    return 3 if phase.kind is PhaseKind.TRAIN else 1


class _Bar:
    """The live line of a terminal."""

    def __init__(self, console: Console, phases: Sequence[Phase], start: Position, limit: int, used: Callable[[], int]) -> None:
        self._console, self._limit, self._used, self._phases = console, limit, used, phases
        self._rows = 0
        self._what: tuple[str, ...] = ("starting",)
        self._began = time.perf_counter()
        self._shown = 0.0
        # No refresh thread: its stack would be reserved under the limit.
        line = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop"))
        self._progress = Progress(line, console=console, auto_refresh=False, transient=True)
        ahead = [(phase, times) for phase, times in counted(phases[start.phase :]) if not phase.elsewhere]
        total = sum(times * phase.rows * _passes(phase) for phase, times in ahead)
        if start.updates:
            total -= phases[start.phase].rows_before(start.updates) * _passes(phases[start.phase])
        self._task = self._progress.add_task(self._what[0], total=total)
        self._progress.start()

    def enter(self, event: PhaseBegun) -> None:
        self._what = _spellings(event.phase)
        self._show()

    def step(self, event: StepDone) -> None:
        if event.step.micro_batch is None:
            return
        phase, p = self._phases[event.step.phase], event.step.partition
        # Rows are counted where they end. Without a backward pass all of them go through a partition before the next.
        parts = 1 if phase.kind is PhaseKind.TRAIN else len(phase.partitions)
        if parts == 1 and p != phase.last:
            return
        span = phase.span(event.step.micro_batch)
        rows = span.stop - span.start
        self._rows += rows if p == phase.last else 0
        self._progress.advance(self._task, rows * _passes(phase) / parts)
        if time.perf_counter() - self._shown > _SHOWN_EVERY:
            self._show()

    def _show(self) -> None:
        now = self._shown = time.perf_counter()
        task = self._progress.tasks[0]
        line = terminal.bar_line(
            self._what, task.percentage / 100, task.time_remaining, self._rows / max(now - self._began, 1e-9), self._used(),
            self._limit, width=self._console.width,
        )  # fmt: skip
        self._progress.update(self._task, description=line)
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


def plan_title(plan: Plan) -> str:
    frozen = f" that learn, and {plan.frozen:,} that are frozen," if plan.frozen else ""
    where = f"{format_size(plan.limit)} (method {plan.method}, {plan.device})"
    return f"plan for {plan.parameters:,} parameters{frozen} under {where}"


def plan_notes(plan: Plan) -> Iterable[str]:
    ratio = plan.full_state / plan.limit
    yield (
        f"full training state {format_size(plan.full_state)} = {ratio:.2f} x the limit; runtime {format_size(plan.runtime)}; "
        f"predicted peak {format_size(plan.peak)} of {format_size(plan.limit)}"
    )
    host = f", host memory {format_size(plan.host_limit)}" if plan.host_limit else ""
    update = f" ({plan.update_seconds:.3g} s an update)" if plan.update_seconds else ""
    yield f"homes: {format_size(plan.disk_bytes)} on disk{host}; predicted time {format_seconds(plan.seconds)}{update}"
    yield from plan.reasons


_LOGGER = logging.getLogger("seqpart.planning")
_SHOWN = 0.1
"""Seconds between two updates of the line on a terminal."""
_SAID = 3.0
"""Seconds between two plain lines; a faster plan prints nothing."""


@contextmanager
def planning_shown(reporter: Reporter) -> Iterator[None]:
    """Shows progress inside, unless the reporter is quiet."""
    if reporter.console.quiet:
        yield
        return
    heard, before = _LOGGER.isEnabledFor(logging.DEBUG), (_LOGGER.level, _LOGGER.propagate)
    line = _Line(reporter)
    _LOGGER.addHandler(line)
    if not heard:  # what nobody had asked for goes to our handler alone
        _LOGGER.setLevel(logging.DEBUG)
        _LOGGER.propagate = False
    try:
        yield
    finally:
        _LOGGER.removeHandler(line)
        _LOGGER.setLevel(before[0])
        _LOGGER.propagate = before[1]
        line.clear()


class _Line(logging.Handler):
    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter, self._file = reporter, reporter.console.file
        self._width = terminal.width_of(reporter.console)
        self._last = time.monotonic() - (0 if self._width is None else _SHOWN)
        self._is_there = False

    def emit(self, record: logging.LogRecord) -> None:
        now, text = time.monotonic(), f"planning: {record.getMessage()}"
        if now - self._last < (_SAID if self._width is None else _SHOWN):
            return
        self._last = now
        if self._width is None:
            self._reporter.say(text)
        else:
            self._write(f"\r\x1b[2K{text[: self._width - 1]}\r")
            self._is_there = True

    def clear(self) -> None:
        if self._is_there:
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
