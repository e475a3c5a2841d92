"""Calls the callbacks of a run, compares its evaluations, and requests an early end."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from seqpart.callbacks import BeginEvent, Ending, EpochEvent, EvalEvent, Event, MetricValue, StepEvent, callers
from seqpart.config import Testing
from seqpart.device.sampler import Sampler
from seqpart.model.inspection import without_stop
from seqpart.model.metrics import Metrics, MetricSinks
from seqpart.report.reporter import Reporter
from seqpart.runtime.executor import Executor
from seqpart.runtime.observer import Observer
from seqpart.schedule import steps
from seqpart.schedule.best import Evaluated, Evaluations, LoopState, criterion_of
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Phases, Rounds
from seqpart.schedule.steps import PhaseDone, Position, Verb


class Watch:
    """Collects the executor's events, and calls callbacks where the whole run stands at a position.

    state: from the checkpoint, the evaluations so far, and an end that was requested.
    """

    def __init__(
        self, observer: Observer, asked: Testing, sampler: Sampler, state: LoopState,
        pause: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        """pause: context manager in which callbacks are called."""
        self._calls, self._pause = callers(observer.callbacks), pause
        self.evaluations = Evaluations.of(criterion_of(asked.best_by), state.evaluations)
        self.ending = Ending()
        why, self._ends_in = state.ending
        """Why an end was requested, and the stretch of phases that is to end."""
        self.ending.ask(why)
        self._patience, self._keeps, self._sampler = asked.early_stopping, asked.keep_best, sampler
        self._metrics = observer.metrics
        self._sums = Metrics() if self._calls["on_step"] or observer.counts_updates else None
        self._over: list[PhaseDone] = []
        """Passes that are over and that no callback has seen yet."""
        self._since = time.perf_counter()
        self.has_new_best = False
        """True if the current weights are the best and must be kept."""

    def heard(self, partitions: int, sets: Sequence[tuple[str, int]]) -> MetricSinks:
        """Returns the sinks for the outputs of the executor's computations. sets: the test sets, if there are several."""
        return MetricSinks(partitions, self._sums, self._metrics, sets)

    def state(self) -> LoopState:
        return LoopState(self.evaluations.kept, (self.ending.asked, self._ends_in))

    def listen(self, event: steps.Event) -> None:
        if isinstance(event, PhaseDone) and event.loss is not None:
            self._over.append(event)

    def begin(self) -> None:
        """Calls on_begin, before anything is trained."""
        if self._calls["on_begin"]:
            self._call("on_begin", BeginEvent(memory=self._sampler.sample(), limit=self._sampler.limit))

    def at_rest(self, executor: Executor, phases: Phases, heard: MetricSinks) -> None:
        """Calls the callbacks whose events have come. Raises whatever a callback raises."""
        step = executor.step
        if self._calls["on_step"] and step.verb is Verb.UPDATE and phases[step.phase].kind is PhaseKind.TRAIN:
            self._step_done(executor, phases[step.phase], heard)
        over, self._over = self._over, []
        for done in over:
            if done.phase.kind is PhaseKind.TEST:
                self._tested(done, phases, step.phase, ends=not done.phase.hands_on(heard.partitions))
            elif done.phase.kind is PhaseKind.TRAIN and done.phase.epochs_done == done.phase.epoch:
                self._epoch_done(done)

    def end_here(self, number: int, phases: Phases) -> None:
        """Ends the stretch of phase `number`, if an end was requested."""
        if self.ending.asked and self._ends_in is None:
            self._ends_in = phases.stands(number)[0]

    def _step_done(self, executor: Executor, phase: Phase, heard: MetricSinks) -> None:
        at, now = executor.position, time.perf_counter()
        updates = at.updates if at.phase == executor.step.phase else phase.updates
        sums, norm = heard.latest(), executor.gradient_norm
        done, whole = phase.share_of(updates)[0], phase.within.updates_of_epoch or phase.updates
        event = StepEvent(
            update=done, epoch=done / whole, partition=phase.partition, loss=sums.mean_loss, rows=sums.rows,
            seconds=now - self._since, learning_rate=executor.learning_rate,
            gradient_norm=None if norm is None else float(norm), memory=self._sampler.sample(), limit=self._sampler.limit,
            ending=self.ending,
        )  # fmt: skip
        self._call("on_step", event)
        self._since = time.perf_counter()

    def _epoch_done(self, done: PhaseDone) -> None:
        assert done.loss is not None
        phase = done.phase
        self._call(
            "on_epoch",
            EpochEvent(
                update=phase.share_of(phase.updates)[0], epoch=phase.epochs_done, partition=phase.partition, loss=done.loss,
                rows=done.rows - done.earlier, seconds=done.seconds, metrics=done.metrics, ending=self.ending,
            ),
        )  # fmt: skip

    def _tested(self, done: PhaseDone, phases: Phases, number: int, *, ends: bool) -> None:
        """Handles an evaluation. ends: true if it is at the network's end."""
        assert done.loss is not None
        update, epoch = trained_before(phases, number)
        is_best = False
        if ends:
            is_best = self.evaluations.add(
                Evaluated(
                    phase=number, update=update, epoch=epoch, loss=done.loss, accuracy=done.accuracy, metrics=dict(done.metrics)
                )
            )
            self.has_new_best = self.has_new_best or (is_best and self._keeps)
            if self._patience is not None and self.evaluations.since >= self._patience:
                self.ending.ask(f"early stopping: {self.evaluations.since} evaluation(s) without a better one")
        event = EvalEvent(
            update=update, epoch=epoch, partition=done.phase.partition, loss=done.loss, rows=done.rows, seconds=done.seconds,
            accuracy=done.accuracy, metrics=done.metrics, is_best=is_best, ending=self.ending,
        )  # fmt: skip
        self._call("on_eval", event)
        self._since = time.perf_counter()

    def _call(self, name: str, event: Event) -> None:
        calls: Sequence[Callable[[Any], object]] = self._calls[name]
        for call in calls:
            try:
                with self._pause():
                    call(event)
            except Exception as error:
                error_of_callback = without_stop(error, "event.stop() ends the training")
                error_of_callback.add_note(f"in {name} of a callback")
                if error_of_callback is error:
                    raise
                raise error_of_callback from error

    def taken(self) -> list[Evaluated]:
        """Returns the evaluations so far and forgets them."""
        found = self.evaluations.all
        self.evaluations.all, self.evaluations.best = [], None
        return found

    def tell_end(self, reporter: Reporter, update: int) -> None:
        """Reports that the current training ended after `update`, as was requested."""
        reporter.say(f"training ends after update {update}: {self.ending.asked}")
        reporter.record("ended early", update=update, why=self.ending.asked)
        self._forget_end()

    def _forget_end(self) -> None:
        self.ending, self._ends_in = Ending(), None

    @property
    def best_update(self) -> int | None:
        """Updates before the best evaluation; None if there were fewer than two evaluations."""
        best = self.evaluations.best
        return best.update if best is not None and len(self.evaluations.all) > 1 else None

    @property
    def metrics(self) -> dict[str, MetricValue]:
        """The user's metrics in the evaluation that the result reports."""
        last = self.evaluations.all[-1] if self.evaluations.all else None
        found = self.evaluations.best if self._keeps and self.evaluations.best is not None else last
        return found.metrics if found is not None else {}

    def end_after(self, phases: Phases, at: Position) -> Position | None:
        """Returns the position after the current training, for a run at `at`, if its end was requested; else None.

        A round of subnetworks is finished first: until then the network is in parts.
        """
        if not self.ending.asked or at.phase >= len(phases):
            return None
        which, epochs, following = phases.stands(at.phase)
        stretch, phase = phases.stretches[which], phases[at.phase]
        if which != self._ends_in or (following is not None and epochs == stretch.epochs):  # it is over anyway
            self._forget_end()
            return None
        if isinstance(stretch, Rounds) and phase.in_round:
            return None
        tested = (
            not at.updates and phase.kind is not PhaseKind.TEST and at.phase and phases[at.phase - 1].kind is PhaseKind.TEST
        )
        first = phases.number_of(which, stretch.epochs, 0)
        return Position(first + _behind(phases, which, first) if tested else first)


def _behind(phases: Phases, which: int, first: int) -> int:
    """Returns how many phases stretch `which` has after its training; `first` is the number of the first of them."""
    return len(phases.stretches[which]) - (first - phases.number_of(which, 0, None))


def updates_before(phases: Phases, at: Position) -> tuple[int, float]:
    """Returns (updates before a position, epochs that they are)."""
    if at.updates:
        phase = phases[at.phase]
        done = int(phase.share_of(at.updates)[0])
        return done, done / (phase.within.updates_of_epoch or phase.updates)
    update, epochs = trained_before(phases, at.phase - 1)
    return int(update), epochs


def trained_before(phases: Phases, number: int) -> tuple[int, float]:
    """Returns (updates, epochs) of the last training phase up to phase `number`."""
    while number >= 0:
        phase = phases[number]
        if phase.kind is PhaseKind.TRAIN:
            return phase.share_of(phase.updates)[0], phase.epochs_done
        number -= 1
    return 0, 0.0
