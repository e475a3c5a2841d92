"""A run's progress after each of its steps, for checking a schedule, for simulating it and for running it."""

from collections.abc import Iterable, Iterator, Sequence

from seqpart.errors import ScheduleError
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import last_trainings
from seqpart.schedule.steps import REWRITES_HOMES, START, Position, Step, Verb, refuse_misspelt

_UPDATED = {PhaseKind.TRAIN, PhaseKind.STATISTICS}
"""Phases that end with an UPDATE."""


class Progress:
    """The state of a schedule: call `begin` before each step and `finish` after it.

    Without `phases` it checks the rules and has no position; for steps that are `checked` already, call only `finish`.
    """

    def __init__(self, phases: Sequence[Phase] = (), start: Position = START, at_once: int | None = None) -> None:
        self.position = start
        """The end of the last finished update."""
        self.updated: set[int] = set()
        """Partitions that have made the optimizer step of the unfinished update."""
        self.loaded: dict[int, bool] = {}
        """Partitions on the device, and whether they were loaded with optimizer state."""
        self.away: set[int] = set()
        """Partitions whose gradients wait at home."""
        self._worked, self._gradients = set[int](), set[int]()
        self._phases, self._at_once = phases, at_once
        self._last = last_trainings(phases)

    def begin(self, step: Step) -> None:
        """Checks a step before it runs. Raises ScheduleError, naming the step, if it breaks a rule.

        Rules: a partition is loaded before it is used, never twice at once, at most `at_once` at a time; an update follows
        work on the same partition; gradients are never lost; homes are cut and put back while nothing is loaded. An update of a
        partition that is not loaded is a step on the host, with gradients that wait at home.
        """
        if step.verb in REWRITES_HOMES:
            if self.loaded:
                raise ScheduleError(f"{step}: partitions {sorted(self.loaded)} are loaded, and homes are to be cut or put back")
        elif step.verb is Verb.LOAD:
            self._load(step)
        elif step.partition not in self.loaded and not (step.verb is Verb.UPDATE and step.partition in self.away):
            raise ScheduleError(f"{step}: partition {step.partition} is not loaded")
        elif step.verb is Verb.UPDATE:
            self._update(step)
        elif step.verb is Verb.DROP:
            self._drop(step)
        else:
            self._worked.add(step.partition)
            if step.verb in (Verb.BACKWARD, Verb.REDUCE):
                self._gradients.add(step.partition)

    def _load(self, step: Step) -> None:
        if step.partition in self.loaded:
            raise ScheduleError(f"{step}: partition {step.partition} is loaded already")
        if len(self.loaded) == self._at_once:
            raise ScheduleError(f"{step}: {self._at_once} partition(s) are loaded, and the plan has room for no more")
        self.loaded[step.partition] = step.more
        if step.more:
            self.away.discard(step.partition)

    def _update(self, step: Step) -> None:
        p = step.partition
        if p not in self._worked | self._gradients:
            raise ScheduleError(f"{step}: no forward or backward came before this update")
        if p in self.away and p in self.loaded:
            raise ScheduleError(f"{step}: partition {p} left its gradients at home")
        self.away.discard(p)
        self._worked.discard(p)
        self._gradients.discard(p)

    def _drop(self, step: Step) -> None:
        p = step.partition
        if (p in self._gradients) != step.more:
            held = "holds gradients that no update has used" if p in self._gradients else "has no gradients to take home"
            raise ScheduleError(f"{step}: partition {p} {held}")
        self._worked.discard(p)
        del self.loaded[p]
        if step.more:
            self.away.add(p)

    def finish(self, step: Step) -> bool:
        """Records a step after it ran. Returns True if it ended an update, or a pass."""
        phase, p, before = self._phases[step.phase], step.partition, self.position
        if step.verb is Verb.UPDATE:
            self.updated.add(p)
            if len(self.updated) == len(phase.partitions):
                self.updated.clear()
                done = self.position.updates + 1
                self.position = Position(step.phase, done) if done < phase.updates else Position(step.phase + 1)
        elif step.verb in REWRITES_HOMES and step.verb.name == phase.kind.name and p == phase.last:
            self.position = Position(step.phase + 1)
        elif step.verb is Verb.FORWARD and phase.kind not in _UPDATED and p == phase.last:
            assert step.micro_batch is not None
            if phase.span(step.micro_batch).stop == phase.rows:
                self.position = Position(step.phase + 1)
        return self.position != before

    def end(self) -> None:
        """Raises ScheduleError if the schedule ends with loaded partitions or unused gradients."""
        if self.loaded:
            raise ScheduleError(f"the schedule ends with partitions {sorted(self.loaded)} loaded")
        if self._gradients:
            raise ScheduleError(f"the schedule ends with gradients of partitions {sorted(self._gradients)} unused")

    def needs_state(self, p: int, stage: int) -> bool:
        """True if the optimizer state of `p` in `stage` will be used again."""
        at = self.position
        now = self._phases[at.phase] if at.phase < len(self._phases) else None
        if now and now.stage == stage and now.trains(p) and at.updates + (p in self.updated) < now.updates:
            return True
        return self._last.get((stage, p), -1) > at.phase


def checked(steps: Iterable[Step], at_once: int = 1) -> Iterator[Step]:
    """Yields `steps` unchanged; raises ScheduleError at the first that breaks a rule, see `Progress.begin`."""
    progress = Progress(at_once=at_once)
    for step in steps:
        refuse_misspelt(step)
        progress.begin(step)
        yield step
    progress.end()
