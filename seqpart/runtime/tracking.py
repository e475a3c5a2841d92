"""A run's numbers for trackers: loss, accuracy, learning rate, memory and rows per second, by the number of updates.

They are logged after every pass, and every few seconds in between: reading a loss synchronizes with a CUDA device. What a
killed run has logged of updates after its last checkpoint is not logged again: those updates give the same bits.
"""

import json
import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import seqpart.files as owned
from seqpart.checkpoint.marker import latest
from seqpart.checkpoint.resume import ResumePoint
from seqpart.checkpoint.run_directory import RunDirectory, new_name
from seqpart.config import TrackerName
from seqpart.device.sampler import Sampler
from seqpart.errors import CorruptFile, OptionError, refusing
from seqpart.model.metrics import Metrics
from seqpart.report.reporter import Reporter
from seqpart.report.trace import MOST, Trace
from seqpart.report.trackers import TensorBoard, WeightsAndBiases, opened
from seqpart.runtime.executor import Executor
from seqpart.runtime.observer import Observer
from seqpart.runtime.partition import Partition
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import counted
from seqpart.schedule.steps import Event, PhaseBegun, PhaseDone, Position, Step, StepDone, Verb
from seqpart.settings import Settings
from seqpart.store.atomic import write_text
from seqpart.store.direct import explaining
from seqpart.units import format_size

TRACKED = "tracking.json"
_SECONDS = 5.0
"""Seconds between two logged points within a pass."""


@dataclass(slots=True)
class _Since:
    """The state when a point was last logged."""

    time: float
    metrics: Metrics | None
    """None in a resumed pass until its first update, because its sums include earlier rows."""
    highest: int = 0
    rows: int = 0


class Tracking:
    """Logs a run's events to its trackers. Call `open` before the first step."""

    def __init__(self, names: Sequence[TrackerName], sampler: Sampler, reporter: Reporter) -> None:
        self._names, self._reporter = names, reporter
        self._trackers: dict[TrackerName, TensorBoard | WeightsAndBiases] = {}
        self._since = _Since(time.monotonic(), Metrics())
        self._phases: Sequence[Phase] = ()
        self._floors: dict[TrackerName, int] = {}
        """The step up to which an earlier process has logged to each tracker."""
        self._before, self._last_step, self._rate = 0, 0, math.nan
        self._partition: weakref.ref[Partition] | None = None
        """The partition that was updated last; a weak reference, as it must not be kept alive."""
        self._path: Path | None = None
        self._latest = 0
        """Bytes in use at the sampler's last sample."""
        self._run = ""
        sampler.listeners.append(self._memory)

    def open(self, directory: RunDirectory, phases: Sequence[Phase], resumed: ResumePoint | None, settings: Settings) -> None:
        """Opens the trackers. resumed: the checkpoint that the run goes on from; it then keeps its run name in the trackers."""
        at = resumed.position if resumed is not None else Position()
        self._phases, self._path = phases, directory.result(TRACKED)
        behind = updates_before(phases, at.phase) + at.updates
        known = _known(directory.root) if resumed is not None else None
        self._run, earlier = known or (new_name("run"), 0)
        if known is None:
            self._note()
        for name in self._names:
            voids_after = behind if known is not None else None
            # TensorBoard voids what was logged after the checkpoint; others keep it.
            self._floors[name] = behind if name == "tensorboard" else earlier
            with refusing(partial(_cannot_begin, name)), explaining(directory.root):
                self._trackers[name] = opened(name, directory.root, self._run, settings.to_json(), voids_after)

    def close(self) -> None:
        for name in list(self._trackers):
            tracker = self._trackers.pop(name)
            self._attempt(name, tracker.close)

    # --- what is heard --------------------------------------------------------------------------------------------

    def before_update(self, partition: Partition, _: Step) -> None:
        self._partition = weakref.ref(partition)

    def listen(self, event: Event) -> None:
        if isinstance(event, StepDone):
            if event.step.verb is Verb.UPDATE:
                self._look_at_rate()
        elif isinstance(event, PhaseBegun):
            self._before = updates_before(self._phases, event.number)
            self._since = replace(self._since, metrics=None if event.earlier else Metrics(), rows=0, time=time.monotonic())
        else:
            self._pass_done(event)

    def at_rest(self, executor: Executor) -> bool:
        """Logs a point if it is time to, after an update or a step of a pass without updates."""
        at, now = executor.position, time.monotonic()
        metrics, since = executor.compute.committed, self._since
        if at.updates and since.metrics is None:
            self._since = replace(since, metrics=replace(metrics), time=now)
        if not at.updates or since.metrics is None or now - since.time < _SECONDS:
            return True
        phase, before = self._phases[at.phase], since.metrics
        weight = metrics.weight - before.weight
        values = {"loss": (float(metrics.loss) - float(before.loss)) / (weight or 1)}
        judged = float(metrics.judged) - float(before.judged)
        if judged:
            values["accuracy"] = (float(metrics.correct) - float(before.correct)) / judged
        values["rows_per_second"] = (metrics.rows - before.rows) / (now - since.time)
        self._log(self._before + at.updates, self._named(phase, values), replace(metrics))
        return True

    def _pass_done(self, event: PhaseDone) -> None:
        phase = event.phase
        if event.loss is None or phase.kind not in (PhaseKind.TRAIN, PhaseKind.TEST):
            return
        values = {"loss": event.loss, "rows_per_second": event.rows_per_second}
        if event.accuracy is not None:
            values["accuracy"] = event.accuracy
        if phase.kind is PhaseKind.TEST:
            values.pop("rows_per_second")
            self._log(self._before, self._named(phase, values), Metrics())
            return
        self._look_at_rate()
        if self._since.rows:  # points of its updates were logged already, and this is the mean of all
            values = {f"pass_{name}": value for name, value in values.items()}
        self._log(self._before + phase.updates, self._named(phase, values), Metrics())

    def _memory(self, used: int) -> None:
        self._latest, self._since.highest = used, max(self._since.highest, used)

    def _look_at_rate(self) -> None:
        partition = self._partition() if self._partition is not None else None
        if partition is not None and partition.optimizer is not None:
            self._rate = float(partition.optimizer.param_groups[0].get("lr", math.nan))

    # --- what is logged -------------------------------------------------------------------------------------------

    def _named(self, phase: Phase, values: dict[str, float]) -> dict[str, float]:
        """Names values: `train/loss`, or `partition_2/train/loss` if partitions are trained or tested one after another."""
        kind = phase.kind.value
        alone = phase.through is None and any(other.partition != phase.partition for other, _ in counted(self._phases))
        where = f"partition_{phase.partition}/{kind}" if alone and not self._ends(phase) else kind
        return {f"{where}/{name}": value for name, value in values.items()}

    def _ends(self, phase: Phase) -> bool:
        """True if it is a test of the network's outputs."""
        end = max(other.last for other, _ in counted(self._phases)) if phase.ends is None else phase.ends
        return phase.kind is PhaseKind.TEST and phase.last == end

    def _log(self, step: int, values: dict[str, float], metrics: Metrics) -> None:
        if math.isfinite(self._rate) and not any("test/" in name for name in values):
            values["learning_rate"] = self._rate
        values["memory_GB"] = (self._since.highest or self._latest) / 1e9
        self._since = _Since(time.monotonic(), metrics, rows=metrics.rows)
        if step < self._last_step:  # updates that are made again after a failed allocation
            return
        self._last_step = step
        for name in list(self._trackers):
            if step >= self._floors[name]:
                self._attempt(name, partial(self._trackers[name].log, step, values))
        self._note()

    def _attempt(self, name: TrackerName, work: Callable[[], None]) -> None:
        """Calls `work`; a tracker that fails is left out from then on, and training goes on."""
        try:
            work()
        except Exception as error:  # whatever the tracker's library raises
            self._trackers.pop(name, None)
            self._reporter.warn(f"--log {name} is no longer used: {type(error).__name__}: {error}")

    def _note(self) -> None:
        assert self._path is not None
        write_text(self._path, json.dumps({"run": self._run, "step": max(self._last_step, *self._floors.values(), 0)}) + "\n")


def tracked(
    names: Sequence[TrackerName], observer: Observer, sampler: Sampler, reporter: Reporter, stack: ExitStack
) -> tuple[Observer, Tracking | None]:
    """Returns `observer`, which also logs to the trackers, if there are any. `stack` closes them."""
    if not names:
        return observer, None
    tracking = Tracking(names, sampler, reporter)
    stack.callback(tracking.close)
    ours = Observer(before_update=tracking.before_update, listen=tracking.listen, at_rest=tracking.at_rest)
    return observer.beside(ours), tracking


def _cannot_begin(name: TrackerName, error: Exception) -> OptionError:
    """Returns the refusal of whatever the tracker's library raises: no login, no server."""
    return OptionError(f"--log {name} cannot begin: {type(error).__name__}: {error}. Leave it out.")


def updates_before(phases: Sequence[Phase], number: int) -> int:
    """Returns the number of updates in all passes before phase `number`."""
    return sum(times * phase.updates for phase, times in counted(phases[:number]) if phase.kind is PhaseKind.TRAIN)


def _known(root: Path) -> tuple[str, int] | None:
    """Returns the run's name in its trackers, and the last step that was logged; None if it had no trackers."""
    path = latest(root, TRACKED)
    try:
        with open(owned.opened(path), "rb") as file:
            found = json.loads(file.read(1 << 16))
        return str(found["run"]), int(found["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        message = f"{path} is damaged: it is not known how far the trackers have logged. Remove it, or leave --log out."
        raise CorruptFile(message, path) from None


_COMPUTE, _OPTIMIZER, _PASSES = "compute", "optimizer", "passes"
_BY_TRANSFERS = {Verb.LOAD, Verb.DROP}
"""Verbs whose bytes the store's own threads record."""


def traced(path: Path | None, observer: Observer, sampler: Sampler, reporter: Reporter, stack: ExitStack) -> Observer:
    """Returns `observer`, which with `path` also writes a trace. `stack` closes it. Raises StoreError."""
    if path is None:
        return observer
    trace = Trace(path)
    reporter.say(f"trace: {path}, which opens at ui.perfetto.dev")

    def end() -> None:
        trace.close()
        if trace.error:
            reporter.warn(f"{path} is not complete: {trace.error}")
        elif trace.is_full:
            reporter.warn(f"{path} is full: it holds the first {format_size(MOST)}")

    stack.callback(end)
    sampler.listeners.append(trace.memory)
    return observer.beside(Observer(listen=Tracing(trace).listen, watched=trace.watched))


class Tracing:
    """Records a run's events in a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._began = trace, 0.0

    def listen(self, event: Event) -> None:
        now = self._trace.now()
        if isinstance(event, StepDone):
            self._step(event, now)
        elif isinstance(event, PhaseBegun):
            self._began = now
        else:
            numbers = {"loss": event.loss, "accuracy": event.accuracy}
            details = {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}
            self._trace.span(_PASSES, str(event.phase), self._began, now - self._began, {"rows": event.rows, **details})

    def _step(self, event: StepDone, now: float) -> None:
        step = event.step
        stream = _OPTIMIZER if step.verb is Verb.UPDATE else _COMPUTE
        moved = {"read": event.bytes_read, "written": event.bytes_written}
        details = {"kind": step.verb.name, "partition": step.partition, **moved}
        self._trace.span(stream, str(step), now - event.seconds, event.seconds, details)
        if step.verb not in _BY_TRANSFERS and event.bytes_read:
            self._trace.moved("rows, boundaries and graphs from disk", event.bytes_read)
        if step.verb not in _BY_TRANSFERS and event.bytes_written:
            self._trace.moved("rows, boundaries and graphs to disk", event.bytes_written)
