"""The grammar of a run: five verbs, the steps made of them, and the phases that the steps belong to.

A schedule is data. The same stream of steps is printed for the user, simulated by the planner and run by the
executor, so the three cannot drift apart. No torch here: only ints.

    [train 0.1] L0 B0.0 U0 B0.1 U0 ... [cache 0] F0.0 F0.1 ... [test 0] F0.0 D0 [train 1.1] L1 ...
"""

import enum
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from seqpart.errors import ScheduleError


class Verb(enum.Enum):
    LOAD = "L"
    """Bring partition p to the device: weights, and optimizer state if it will update."""
    FORWARD = "F"
    """Run p on micro-batch m without a graph; keep its output boundary."""
    BACKWARD = "B"
    """Run p on m with a graph and back-propagate p's own loss."""
    UPDATE = "U"
    """Optimizer step for p, then free its gradients."""
    DROP = "D"
    """Send p home."""


_HAS_MICRO_BATCH = {Verb.FORWARD, Verb.BACKWARD}


@dataclass(frozen=True, slots=True)
class Step:
    verb: Verb
    partition: int
    micro_batch: int | None = None
    phase: int = 0

    def __str__(self) -> str:
        suffix = "" if self.micro_batch is None else f".{self.micro_batch}"
        return f"{self.verb.value}{self.partition}{suffix}"


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one micro-batch: positions start..stop of the phase's row order."""

    start: int
    stop: int
    update_rows: int
    """Rows of the whole update that this micro-batch is a part of."""
    ends_update: bool


class PhaseKind(enum.Enum):
    TRAIN = "train"
    """One epoch of updates over the training rows."""
    CACHE = "cache"
    """One forward pass over the training rows; the outputs become the next partition's rows."""
    TEST = "test"
    """One forward pass over the test rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One pass over the training or test rows."""

    kind: PhaseKind
    partition: int
    rows: int
    batch: int
    """Rows of one update; in a forward pass, rows of one micro-batch."""
    micro_batch: int
    epoch: int = 0
    """Counts from 1 in a training phase."""
    shuffle: bool = False

    def __str__(self) -> str:
        epoch = f".{self.epoch}" if self.kind is PhaseKind.TRAIN else ""
        return f"[{self.kind.value} {self.partition}{epoch}]"

    @property
    def updates(self) -> int:
        return -(-self.rows // self.batch)

    @property
    def micro_batches_per_update(self) -> int:
        return -(-self.batch // self.micro_batch)

    def span(self, m: int) -> Span:
        """Rows of micro-batch `m`, which counts from the start of the phase."""
        update, part = divmod(m, self.micro_batches_per_update)
        start = update * self.batch
        end = min(start + self.batch, self.rows)
        stop = min(start + (part + 1) * self.micro_batch, end)
        return Span(start + part * self.micro_batch, stop, end - start, stop == end)

    def spans(self, first_update: int = 0) -> Iterator[tuple[int, Span]]:
        """(m, span) of every micro-batch from update `first_update` on."""
        m, last = first_update * self.micro_batches_per_update, first_update * self.batch
        while last < self.rows:
            span = self.span(m)
            yield m, span
            m, last = m + 1, span.stop


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands: `updates` finished in phase number `phase`."""

    phase: int = 0
    updates: int = 0


START = Position()


def one_at_a_time(phases: Sequence[Phase], start: Position = START) -> Iterator[Step]:
    """The steps of phases that each need one partition: it is loaded before its first phase and dropped after its last.

    L0 B0.0 U0 B0.1 U0 F0.0 F0.1 D0  L1 B1.0 U1 ...
    """
    loaded: int | None = None
    for index in range(start.phase, len(phases)):
        phase = phases[index]
        if phase.partition != loaded:
            if loaded is not None:
                yield Step(Verb.DROP, loaded, phase=index - 1)
            loaded = phase.partition
            yield Step(Verb.LOAD, loaded, phase=index)
        for m, span in phase.spans(start.updates if index == start.phase else 0):
            if phase.kind is PhaseKind.TRAIN:
                yield Step(Verb.BACKWARD, loaded, m, index)
                if span.ends_update:
                    yield Step(Verb.UPDATE, loaded, phase=index)
            else:
                yield Step(Verb.FORWARD, loaded, m, index)
    if loaded is not None:
        yield Step(Verb.DROP, loaded, phase=len(phases) - 1)


def checked(steps: Iterable[Step], slots: int = 1) -> Iterator[Step]:
    """Pass `steps` through and raise ScheduleError, naming the step, at the first that breaks a rule.

    Rules: a partition is loaded before it is used, never twice at once, at most `slots` at a time; an update
    follows a backward of the same partition; gradients are never dropped; at the end nothing is loaded.
    """
    loaded: set[int] = set()
    owes_update: set[int] = set()
    for step in steps:
        p = step.partition
        if (step.micro_batch is None) == (step.verb in _HAS_MICRO_BATCH):
            raise ScheduleError(f"{step}: a micro-batch goes with F and B, and only with them")
        if step.verb is Verb.LOAD:
            if p in loaded:
                raise ScheduleError(f"{step}: partition {p} is loaded already")
            if len(loaded) == slots:
                raise ScheduleError(f"{step}: {slots} partition(s) are loaded, and the plan has room for no more")
            loaded.add(p)
        elif p not in loaded:
            raise ScheduleError(f"{step}: partition {p} is not loaded")
        if step.verb is Verb.BACKWARD:
            owes_update.add(p)
        elif step.verb is Verb.UPDATE:
            if p not in owes_update:
                raise ScheduleError(f"{step}: no backward came before this update")
            owes_update.remove(p)
        elif step.verb is Verb.DROP:
            if p in owes_update:
                raise ScheduleError(f"{step}: partition {p} holds gradients that no update has used")
            loaded.remove(p)
        yield step
    if loaded:
        raise ScheduleError(f"the schedule ends with partitions {sorted(loaded)} loaded")


_WORD = re.compile(r"\[(?:train|cache|test) \d+(?:\.\d+)?\]|\S+")


def to_text(steps: Iterable[Step], phases: Sequence[Phase] = ()) -> str:
    """`L0 B0.0 U0 D0`; with `phases`, each phase's name stands before its first step."""
    words: list[str] = []
    current: int | None = None
    for step in steps:
        if phases and step.phase != current:
            words.append(str(phases[step.phase]))
            current = step.phase
        words.append(str(step))
    return " ".join(words)


def parse(text: str) -> list[Step]:
    """The steps that `to_text` printed; phase names count the phases. Raises ScheduleError on any other word."""
    steps: list[Step] = []
    phase = -1
    for word in _WORD.findall(text):
        if " " in word:  # only a phase's name has one
            phase += 1
            continue
        match = re.fullmatch(r"([LFBUD])(\d+)(?:\.(\d+))?", word)
        if not match:
            raise ScheduleError(f"expected a step such as L0, F0.1, B0.1, U0 or D0; found {word!r}")
        micro_batch = None if match[3] is None else int(match[3])
        step = Step(Verb(match[1]), int(match[2]), micro_batch, max(phase, 0))
        if (micro_batch is None) == (step.verb in _HAS_MICRO_BATCH):
            raise ScheduleError(f"{word}: a micro-batch goes with F and B, and only with them")
        steps.append(step)
    return steps
