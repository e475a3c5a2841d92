"""Writes a run's events as spans of a trace: compute and optimizer steps, and passes, each on a line of their own."""

import math
from contextlib import ExitStack
from pathlib import Path

from seqpart.device.sampler import Sampler
from seqpart.report.reporter import Reporter
from seqpart.report.trace import MOST, Trace
from seqpart.runtime.observer import Observer
from seqpart.schedule.events import Event, PhaseBegun, StepDone
from seqpart.schedule.steps import Verb
from seqpart.units import format_size

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
    sampler.told.append(trace.memory)
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
            said = {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}
            self._trace.span(_PASSES, str(event.phase), self._began, now - self._began, {"rows": event.rows, **said})

    def _step(self, event: StepDone, now: float) -> None:
        step = event.step
        stream = _OPTIMIZER if step.verb is Verb.UPDATE else _COMPUTE
        said = {"kind": step.verb.name, "partition": step.partition, "read": event.bytes_read, "written": event.bytes_written}
        self._trace.span(stream, str(step), now - event.seconds, event.seconds, said)
        if step.verb not in _BY_TRANSFERS and event.bytes_read:
            self._trace.moved("rows, boundaries and graphs from disk", event.bytes_read)
        if step.verb not in _BY_TRANSFERS and event.bytes_written:
            self._trace.moved("rows, boundaries and graphs to disk", event.bytes_written)
