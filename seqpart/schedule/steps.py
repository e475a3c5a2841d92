"""The grammar of a run: verbs, the steps made of them, the schedule of given phases, and the events of its execution.

A schedule is data. The same stream of steps is printed for the user, simulated by the planner and run by the
executor, so the three cannot drift apart. It has only ints, no torch.

    [train 0.1] L0+ B0.0 U0 B0.1 U0 ... [cache 0] F0.0 F0.1 ... [test 0] F0.0 D0 [train 1.1] L1+ ...
    [train 0-2.1] L0 F0.0 F0.1 D0 L1 F1.0 F1.1 D1 L2+ B2.0 B2.1 U2 D2 L1+ B1.0 B1.1 U1 D1 L0+ B0.0 B0.1 U0 ...
    [split 0.1] S0 [train 1.1] L1+ B1.0 U1 ... D1 [train 2.1] L2+ B2.0 U2 ... D2 [merge 0.1] M0 [split 0.2] S0 ...
    [train 0.1] L0+ B0.0 U0 ... D0 [gather 0-1] G0 G1 [draw 1] L1 F1.0 F1.1 ... D1 [train 2.1] L2+ B2.0 U2 ...
"""

import enum
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from seqpart.callbacks import MetricValue
from seqpart.errors import ScheduleError
from seqpart.schedule.phase import Phase, PhaseKind


class Verb(enum.Enum):
    LOAD = "L"
    """Load the weights of partition p to the device; `L0+`: also optimizer state, and offloaded gradients."""
    FORWARD = "F"
    """Run p on micro-batch m; keep its output boundary, and its graph if the phase says so."""
    BACKWARD = "B"
    """Recompute p on m with a graph, unless FORWARD kept it, and back-propagate p's own loss or the gradient that p+1 left."""
    REDUCE = "R"
    """Add up p's gradients over all processes, each of which has back-propagated its own micro-batches."""
    UPDATE = "U"
    """Optimizer step for p, then free its gradients; if nothing is trained, keep the buffers as they are now."""
    DROP = "D"
    """Save p to its homes and free its slot; `D0+`: with gradients that wait for the total norm."""
    SPLIT = "S"
    """Cut the homes of p into those of the network's parts, while nothing is on the device."""
    GATHER = "G"
    """With several processes: give p, or before MERGE p's parts, to all of them, each from the one that has trained it."""
    MERGE = "M"
    """Put the parts' pieces of p back into its homes, while nothing is on the device."""

    __hash__ = object.__hash__  # the planner makes millions of lookups, and Enum's own hash is not in C


_HAS_MICRO_BATCH = {Verb.FORWARD, Verb.BACKWARD}
_HAS_MORE = {Verb.LOAD, Verb.DROP}
REWRITES_HOMES = {Verb.SPLIT, Verb.GATHER, Verb.MERGE}
"""Verbs that rewrite homes while nothing is loaded."""


class Step(NamedTuple):
    verb: Verb
    partition: int
    micro_batch: int | None = None
    phase: int = 0
    more: bool = False
    """The `+` of LOAD and DROP."""

    def __str__(self) -> str:
        suffix = "" if self.micro_batch is None else f".{self.micro_batch}"
        return f"{self.verb.value}{self.partition}{suffix}{'+' if self.more else ''}"


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a run: `updates` finished in phase number `phase`."""

    phase: int = 0
    updates: int = 0


START = Position()


class _Loaded(dict[int, int | None]):
    """Partitions on the device, each with the stage whose optimizer state was loaded too (None: weights only)."""

    def bring(self, p: int, phase: Phase, index: int, *, to_update: bool) -> Iterator[Step]:
        stage = phase.stage if to_update else None
        if p in self and (stage is None or self[p] == stage):
            return
        if p in self:
            yield from self.send(p, index)
        self[p] = stage
        yield Step(Verb.LOAD, p, phase=index, more=to_update)

    def send(self, p: int, index: int, *, gradients: bool = False) -> Iterator[Step]:
        del self[p]
        yield Step(Verb.DROP, p, phase=index, more=gradients)


_AT_HOME = {PhaseKind.SPLIT: Verb.SPLIT, PhaseKind.MERGE: Verb.MERGE, PhaseKind.GATHER: Verb.GATHER}


def steps_of(phases: Sequence[Phase], start: Position = START) -> Iterator[Step]:
    """Yields the steps of `phases` from `start` on. A partition stays on the device from phase to phase while it is needed."""
    loaded = _Loaded()
    for index in range(start.phase, len(phases)):
        phase = phases[index]
        first_update = start.updates if index == start.phase else 0
        if phase.kind in _AT_HOME or phase.elsewhere:
            for p in list(loaded):
                yield from loaded.send(p, max(index - 1, 0))
            gathers = phase.kind is PhaseKind.MERGE and phase.ranks > 1
            verbs = () if phase.elsewhere else (*[Verb.GATHER] * gathers, _AT_HOME[phase.kind])
            yield from (Step(verb, p, phase=index) for p in phase.partitions for verb in verbs)
        elif phase.breadth_first:
            one_update = _in_pairs if phase.in_pairs else _breadth_first
            for update in range(first_update, phase.updates):
                yield from one_update(phase, index, loaded, update)
        else:
            yield from _depth_first(phase, index, loaded, first_update)
    for p in list(loaded):
        yield from loaded.send(p, len(phases) - 1)


_AFTER_BACKWARD = (Verb.UPDATE,), (Verb.REDUCE, Verb.UPDATE)
"""Verbs that end an update: in one process, in several."""


def _depth_first(phase: Phase, index: int, loaded: _Loaded, first_update: int) -> Iterator[Step]:
    """Yields a phase with all its partitions loaded: L0+ L1+ F0.0 B1.0 B0.0 U1 U0 F0.1 ..., or one: L0+ B0.0 U0 B0.1 U0."""
    for p in [p for p in loaded if p not in phase.partitions]:
        yield from loaded.send(p, max(index - 1, 0))
    for p in phase.partitions:
        yield from loaded.bring(p, phase, index, to_update=phase.loads_state(p))
    training = phase.kind is PhaseKind.TRAIN
    # A training phase's last partition runs forward in its BACKWARD, if it has one.
    lowest = phase.lowest if training else phase.last + 1
    for update in range(first_update, phase.updates):
        for m in phase.own_micro_batches(update):
            for p in range(phase.partition, phase.last + (lowest > phase.last)):
                yield Step(Verb.FORWARD, p, m, index)
            for p in range(phase.last, lowest - 1, -1):
                yield Step(Verb.BACKWARD, p, m, index)
        if training or phase.kind is PhaseKind.STATISTICS:
            for verb in _AFTER_BACKWARD[phase.ranks > 1]:
                yield from (Step(verb, p, phase=index) for p in reversed(phase.partitions))


def _breadth_first(phase: Phase, index: int, loaded: _Loaded, update: int) -> Iterator[Step]:
    """Yields one update, one partition after the other, with all micro-batches of each before the next.

    The first partition stays for the next update's forward pass, so each is loaded twice at most, and saved once. A partition
    is updated as soon as it has its gradients, so only one holds gradients at a time; if updates wait for the total norm,
    gradients of streamed partitions wait at home, and those of partitions that stay wait on the device.
    """
    micro_batches, training = phase.own_micro_batches(update), phase.kind is PhaseKind.TRAIN
    first, last = phase.partition, phase.last
    lowest = phase.lowest if training else last + 1
    for p in [p for p in loaded if p != first and (p in phase.streams or p not in phase.partitions)]:
        yield from loaded.send(p, max(index - 1, 0))
    waiting = []
    for p in range(first, last + (lowest > last)):
        streams = p in phase.streams
        yield from loaded.bring(p, phase, index, to_update=not streams and phase.loads_state(p))
        yield from (Step(Verb.FORWARD, p, m, index) for m in micro_batches)
        if training and p < lowest:
            yield from (Step(verb, p, phase=index) for verb in _AFTER_BACKWARD[phase.ranks > 1])
        if streams:
            yield from loaded.send(p, index)
    for p in range(last, lowest - 1, -1):
        streams = p in phase.streams
        waits = phase.defers_updates and phase.trains(p) and not (streams and p == lowest)
        yield from loaded.bring(p, phase, index, to_update=phase.loads_state(p) and not (streams and waits))
        yield from (Step(Verb.BACKWARD, p, m, index) for m in micro_batches)
        if phase.ranks > 1:
            yield Step(Verb.REDUCE, p, phase=index)
        if waits:
            waiting.append(p)
        else:
            yield Step(Verb.UPDATE, p, phase=index)
        if streams and (p > first or phase.streams.intersection(waiting)):
            yield from loaded.send(p, index, gradients=waits)
    for p in reversed(waiting):
        streams = p in phase.streams - phase.host_steps  # a step on the host takes gradients from where they wait
        if streams:
            yield from loaded.bring(p, phase, index, to_update=True)
        yield Step(Verb.UPDATE, p, phase=index)
        if streams:
            yield from loaded.send(p, index)


def _in_pairs(phase: Phase, index: int, loaded: _Loaded, update: int) -> Iterator[Step]:
    """Yields one update, pair by pair of scores j < k: L1+ L2+ F0.0 F1.0 B2.0 B1.0 B0.0 D2+ L3+ ... U1 D1 ... U0.

    The first partition is common to all scores, and stays. A pair's rows run with graphs, one micro-batch after the other; the
    later score owns the loss. Gradients of a score wait at home for its next pair, and it is updated after its last.
    """
    common, scores = phase.partition, phase.partitions[1:]
    micro_batches = phase.own_micro_batches(update)
    for p in [p for p in loaded if p != common]:
        yield from loaded.send(p, max(index - 1, 0))
    yield from loaded.bring(common, phase, index, to_update=True)
    for place, j in enumerate(scores[:-1], start=1):
        yield from loaded.bring(j, phase, index, to_update=True)
        for k in scores[place:]:
            yield from loaded.bring(k, phase, index, to_update=True)
            for m in micro_batches:
                yield from (Step(Verb.FORWARD, p, m, index) for p in (common, j))
                yield from (Step(Verb.BACKWARD, p, m, index) for p in (k, j, common))
            is_last = place == len(scores) - 1
            if is_last:
                yield Step(Verb.UPDATE, k, phase=index)
            yield from loaded.send(k, index, gradients=not is_last)
        yield Step(Verb.UPDATE, j, phase=index)
        yield from loaded.send(j, index)
    yield Step(Verb.UPDATE, common, phase=index)


def refuse_misspelt(step: Step) -> None:
    """Raises ScheduleError for a micro-batch or a `+` that the verb does not have, and for a missing micro-batch."""
    if (step.micro_batch is None) == (step.verb in _HAS_MICRO_BATCH):
        raise ScheduleError(f"{step}: a micro-batch goes with F and B, and only with them")
    if step.more and step.verb not in _HAS_MORE:
        raise ScheduleError(f"{step}: + goes with L and D, and only with them")


def to_text(steps: Iterable[Step], phases: Sequence[Phase] = ()) -> str:
    """Returns the steps as text, `L0 B0.0 U0 D0`; with `phases`, each phase's name precedes its first step."""
    words: list[str] = []
    current: int | None = None
    for step in steps:
        if phases and step.phase != current:
            words.append(str(phases[step.phase]))
            current = step.phase
        words.append(str(step))
    return " ".join(words)


FARTHEST = 4096
"""Most steps to look ahead; a LOAD farther away is not begun yet."""


class Lookahead:
    """Iterates over `steps`; `next_load` peeks, without taking a step out of the order."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = iter(steps)
        self._seen: deque[Step] = deque()

    def __iter__(self) -> Iterator[Step]:
        while self._seen or self._fetch():
            yield self._seen.popleft()

    def _fetch(self) -> bool:
        step = next(self._steps, None)
        if step is not None:
            self._seen.append(step)
        return step is not None

    def next_load(self, begun: set[int]) -> Step | None:
        """Returns the first LOAD ahead whose partition is not in `begun`; none after a step that rewrites homes."""
        index = 0
        passed = set(begun)
        while index < FARTHEST and (index < len(self._seen) or self._fetch()):
            step = self._seen[index]
            index += 1
            if step.verb in REWRITES_HOMES:
                return None
            if step.verb is Verb.LOAD:
                if step.partition not in passed:
                    return step
                passed.discard(step.partition)  # a second visit is another LOAD
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """One executed step: its disk traffic in bytes, and seconds. A transfer counts where it is started or waited for."""

    step: Step
    bytes_read: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseDone:
    """One pass is over. `loss` is the mean over its rows, `accuracy` is None if the outputs are no scores of classes."""

    phase: Phase
    loss: float | None
    """None if the partition has no loss."""
    accuracy: float | None
    rows: int
    earlier: int = 0
    """Those of `rows` from updates made before, if a run was resumed within the pass."""
    seconds: float
    """Seconds of the pass, without those of earlier rows."""
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)
    """Values of the user's own metrics."""

    @property
    def rows_per_second(self) -> float:
        return (self.rows - self.earlier) / max(self.seconds, 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseBegun:
    phase: Phase
    number: int
    earlier: int = 0
    """Rows of updates made before, as in PhaseDone."""


Event = StepDone | PhaseDone | PhaseBegun
