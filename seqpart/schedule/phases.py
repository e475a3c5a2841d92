"""The phases of a run as a lazy sequence: 200 million epochs take no more memory than two."""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import overload

from seqpart.schedule.lengths import Interval
from seqpart.schedule.phase import Phase, PhaseKind


def _times(passes: int, every: int | None) -> int:
    """Returns how often something comes that follows each `every`-th of so many passes, without the time after the last."""
    return 0 if every is None else max(0, passes - 1) // every


class Stretch:
    """Epochs, each of some rounds of some passes that train; `following` comes after each `every`-th of them, and the last."""

    __slots__ = ()
    epochs: int
    following: tuple[Phase, ...]
    every: int | None
    rounds = per_round = 1
    """Rounds of an epoch, and passes of a round."""

    def _pass(self, number: int) -> Phase:
        """Returns a pass by its number, without `following`."""
        raise NotImplementedError

    def _passes(self, first: int, stop: int) -> Iterator[tuple[Phase, int]]:
        """Yields each different pass from phase `first` to `stop`, and how often it comes."""
        raise NotImplementedError

    @property
    def per_epoch(self) -> int:
        return self.rounds * self.per_round

    @property
    def tests(self) -> int:
        """How often `following` comes, without the last time."""
        return _times(self.epochs, self.every)

    def __len__(self) -> int:
        return self.epochs * self.per_epoch + (self.tests + 1) * len(self.following)

    def __getitem__(self, index: int) -> Phase:
        number, _, which = self._place(index)
        return self._pass(number) if which is None else self.following[which]

    def _place(self, index: int) -> tuple[int, int, int | None]:
        """Returns (passes before `index`, how often `following` is over by then, which of it is there; None: a pass)."""
        passes = (self.every if self.every is not None and self.tests else max(1, self.epochs)) * self.per_epoch
        times = min(index // (passes + len(self.following)), self.tests)
        at = index - times * (passes + len(self.following))
        here = min(passes, self.epochs * self.per_epoch - times * passes)
        return times * passes + min(at, here), times, None if at < here else at - here

    def _tests_after(self, epochs: int) -> int:
        return 0 if self.every is None else min(epochs // self.every, self.tests)

    def counted(self, first: int, stop: int) -> Iterator[tuple[Phase, int]]:
        """Yields each different phase from `first` to `stop`, and how often it comes."""
        yield from self._passes(first, stop)
        (_, times, which), (_, more, last) = self._place(first), self._place(stop)
        for number, phase in enumerate(self.following):
            count = more - times + (last is not None and last > number) - (which is not None and which > number)
            if count:
                yield phase, count

    def trainings(self) -> Iterator[tuple[int, Phase]]:
        """Yields the passes of the last round, each with its number in the stretch."""
        last = len(self) - len(self.following)
        yield from ((number, self[number]) for number in range(last - self.per_round, last) if self.epochs)

    def walked(self) -> Iterator[tuple[Phase, int]]:
        """Yields the first two rounds and the phases after them, each with how many phases of the stretch it stands for."""
        for number, (phases, stands_for) in enumerate(self._walked()):
            yield from ((phase, stands_for) for phase in phases)
            if not number and self.tests:
                yield from ((phase, self.tests) for phase in self.following)
        yield from ((phase, 1) for phase in self.following)

    def _walked(self) -> Iterator[tuple[list[Phase], int]]:
        count = self.epochs * self.rounds
        for number, stands_for in ((0, 1), (1, count - 1))[: min(count, 2)]:
            yield [self._pass(number * self.per_round + at) for at in range(self.per_round)], stands_for


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs(Stretch):
    """A stretch of phases: `epochs` passes of `train`, with `following` after each `every`-th of them and after the last."""

    train: Phase
    epochs: int
    following: tuple[Phase, ...]
    every: int | None = None

    def _pass(self, number: int) -> Phase:
        return replace(self.train, epoch=number + 1)

    def stands(self, index: int) -> tuple[int, int | None]:
        """Returns (passes of `train` before `index`, which of `following` it is; None if it is a pass of `train`)."""
        number, _, which = self._place(index)
        return number, which

    def index_of(self, epochs: int, following: int | None) -> int:
        """Inverse of `stands`; gives the next pass of `train` if no `following` comes after so many epochs."""
        tests = self._tests_after(epochs)
        if following is None or (epochs < self.epochs and (self.every is None or epochs % self.every or not epochs)):
            return epochs + tests * len(self.following)
        return epochs + (self.tests if epochs == self.epochs else tests - 1) * len(self.following) + following

    def _passes(self, first: int, stop: int) -> Iterator[tuple[Phase, int]]:
        """Epochs count as one phase."""
        before, after = self._place(first)[0], self._place(stop)[0]
        if after > before:
            yield self._pass(before), after - before


class Phases(Sequence[Phase]):
    """The phases of several stretches, one after the other; or a slice of them, from phase number `start` to `stop`."""

    def __init__(self, stretches: Iterable["Epochs | Rounds | Pieces"], start: int = 0, stop: int | None = None) -> None:
        self.stretches = tuple(stretches)
        self._ends = list(itertools.accumulate(len(stretch) for stretch in self.stretches))
        whole = self._ends[-1] if self._ends else 0
        self._start, self._stop = start, whole if stop is None else stop
        self._latest: tuple[int, Phase] | None = None

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: int) -> Phase: ...

    @overload
    def __getitem__(self, index: slice) -> "Phases": ...

    def __getitem__(self, index: int | slice) -> "Phase | Phases":
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1, "a run goes forward, phase by phase"
            return Phases(self.stretches, self._start + start, self._start + max(start, stop))
        number = range(self._start, self._stop)[index]
        if self._latest is None or self._latest[0] != number:  # it is read at every step
            which = bisect_right(self._ends, number)
            self._latest = number, self.stretches[which][number - self._begins(which)]
        return self._latest[1]

    def _begins(self, which: int) -> int:
        return self._ends[which - 1] if which else 0

    def counted(self) -> Iterator[tuple[Phase, int]]:
        for which, stretch in enumerate(self.stretches):
            begins, ends = self._begins(which), self._ends[which]
            first, stop = max(begins, self._start), min(ends, self._stop)
            if first < stop:
                yield from stretch.counted(first - begins, stop - begins)

    def trainings(self) -> Iterator[tuple[int, Phase]]:
        """Yields the passes of each stretch's last round, each with its number among all phases."""
        for which, stretch in enumerate(self.stretches):
            yield from ((self._begins(which) + number, phase) for number, phase in stretch.trainings())

    def stands(self, number: int) -> tuple[int, int, int | None]:
        """Returns (stretch, *`Epochs.stands`) for phase `number`, which may be one after the last."""
        which = min(bisect_right(self._ends, number), len(self.stretches) - 1)
        return which, *self.stretches[which].stands(number - self._begins(which))

    def number_of(self, which: int, epochs: int, following: int | None) -> int:
        return self._begins(which) + self.stretches[which].index_of(epochs, following)

    def of_stage(self, stage: int) -> "Phases":
        return Phases(stretch for stretch in self.stretches if stretch.train.stage == stage)


def counted(phases: Sequence[Phase]) -> Iterator[tuple[Phase, int]]:
    """Yields each different phase, roughly in order, and how often it comes: a stretch's epochs count as its first one."""
    return phases.counted() if isinstance(phases, Phases) else ((phase, 1) for phase in phases)


def dividing(phases: Sequence[Phase]) -> Phase | None:
    """Returns a phase in which ranks divide optimizer state, which says whose it is; None if none does."""
    return next((phase for phase, _ in counted(phases) if phase.divides_state), None)


def rooms_for_gradients(phases: Sequence[Phase]) -> frozenset[int]:
    """Returns the partitions whose slot has room for gradients that wait at home."""
    return frozenset(p for phase, _ in counted(phases) for p in phase.streams if phase.gradients_wait(p))


def last_trainings(phases: Sequence[Phase]) -> dict[tuple[int, int], int]:
    """Returns the number of the last phase that trains a partition, by (stage, partition)."""
    trainings = phases.trainings() if isinstance(phases, Phases) else enumerate(phases)
    return {(phase.stage, p): number for number, phase in trainings for p in phase.partitions if phase.trains(p)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds(Stretch):
    """A stretch of phases: `split`, each of `turns` for `local` updates, `merge`, again and again; `following` after each
    `every`-th epoch and after the last.

    A turn is a part's pass over its rows of an epoch; all parts have equally many. An epoch has as many rounds as a turn needs,
    the last of them with the updates that are left.
    """

    split: Phase
    turns: tuple[Phase, ...]
    merge: Phase
    local: int
    epochs: int
    following: tuple[Phase, ...]
    every: int | None = None

    @property
    def train(self) -> Phase:
        return self.turns[0]

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return -(-self.train.updates // self.local)

    @property
    def per_round(self) -> int:  # type: ignore[override]
        return len(self.turns) + 2

    def _pass(self, number: int) -> Phase:
        round_, which = divmod(number, self.per_round)
        if which == 0:
            return replace(self.split, epoch=round_ + 1)
        if which > len(self.turns):
            return replace(self.merge, epoch=round_ + 1)
        turn, (epoch, of_epoch) = self.turns[which - 1], divmod(round_, self.rounds)
        done = of_epoch * self.local
        before = done * turn.batch
        return replace(
            turn, epoch=epoch + 1,
            within=replace(turn.within, done=done, updates_of_epoch=turn.updates, skips=turn.within.skips + before),
            rows=min(self.local * turn.batch, turn.rows - before),
        )  # fmt: skip

    def stands(self, index: int) -> tuple[int, int | None]:
        """Returns (epochs that are over before `index`, phases since; None: none). An earlier epoch than the last includes the
        phases of `following` after it."""
        number, _, which = self._place(index)
        epoch, since = divmod(number, self.per_epoch)
        if which is None:
            return epoch, since or None
        return (epoch, which) if epoch == self.epochs else (epoch - 1, self.per_epoch + which)

    def index_of(self, epochs: int, following: int | None) -> int:
        """Inverse of `stands`."""
        return epochs * self.per_epoch + self._tests_after(epochs) * len(self.following) + (following or 0)

    def _passes(self, first: int, stop: int) -> Iterator[tuple[Phase, int]]:
        """Rounds count as one, except for the last of an epoch."""
        last = (self.rounds - 1) * self.per_round
        before, after = self._counts(self._place(first)[0]), self._counts(self._place(stop)[0])
        for which, (was, now) in enumerate(zip(before, after, strict=True)):
            for number, times in ((which, now[0] - was[0]), (last + which, now[1] - was[1])):
                if times:
                    yield self._pass(number), times

    def _counts(self, number: int) -> list[tuple[int, int]]:
        """Returns how often each phase of a round comes before pass `number`: in rounds that are not the last of an epoch, and
        in those that are."""
        epoch, since = divmod(number, self.per_epoch)
        round_, which = divmod(since, self.per_round)
        done = [round_ + (which > phase) for phase in range(self.per_round)]
        return [(epoch * (self.rounds - 1) + min(n, self.rounds - 1), epoch + max(0, n - self.rounds + 1)) for n in done]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces(Stretch):
    """A stretch of phases: `updates` updates of `train`, epoch after epoch, with `following` after each `every`-th of them and
    after the last.

    `train` is a whole epoch. A piece ends at the end of an epoch, before `following`, or with the last update.
    """

    train: Phase
    updates: int
    following: tuple[Phase, ...]
    every: int | None = None
    """Updates between two times `following`; None: only at the end."""

    @property
    def epochs(self) -> int:  # type: ignore[override]
        """Number of epochs, the last of which may be a part of one."""
        return -(-self.updates // self.train.updates)

    def __len__(self) -> int:
        return self._begins(self.updates - 1) + 1 + len(self.following)

    def _begins(self, update: int) -> int:
        """Returns the number of phases before the piece that has `update`."""
        epoch, every = self.train.updates, self.every
        if every is None:
            return update // epoch
        return update // epoch + update // every - update // lcm(epoch, every) + len(self.following) * (update // every)

    @property
    def tests(self) -> int:
        return _times(self.updates, self.every)

    def _place(self, index: int) -> tuple[int, int, int | None]:
        """A pass is known by its first update, from 0: here that of the last piece that begins at or before `index`."""
        low, high = 0, self.updates - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._begins(middle) <= index else (low, middle - 1)
        epoch, tests = self.train.updates, 0 if self.every is None else low // self.every
        first = max(low // epoch * epoch, tests * (self.every or 0))
        at = index - self._begins(first)
        return first, tests, at - 1 if at else None

    def _pass(self, first: int) -> Phase:
        train, done = self.train, first % self.train.updates
        stop = min(first - done + train.updates, self.updates)
        if self.every is not None:
            stop = min(stop, first // self.every * self.every + self.every)
        before = done * train.batch
        return replace(
            train, epoch=first // train.updates + 1, epochs=self.epochs,
            within=replace(
                train.within, done=done, updates_of_epoch=train.updates, updates_of_stage=self.updates,
                skips=train.within.skips + before,
            ),
            rows=min((stop - first) * train.batch, train.rows - before),
        )  # fmt: skip

    @property
    def _last(self) -> int:
        """Number of the first phase after all pieces."""
        return len(self) - len(self.following)

    def stands(self, index: int) -> tuple[int, int | None]:
        """Returns (epochs that are over before `index`, phases since; None: none). All are over after the last piece."""
        if index >= self._last:
            return self.epochs, index - self._last
        epoch = self._place(index)[0] // self.train.updates
        since = index - self._begins(epoch * self.train.updates)
        return epoch, since or None

    def index_of(self, epochs: int, following: int | None) -> int:
        """Inverse of `stands`."""
        return (self._last if epochs >= self.epochs else self._begins(epochs * self.train.updates)) + (following or 0)

    def _passes(self, first: int, stop: int) -> Iterator[tuple[Phase, int]]:
        """Pieces count as one, with their average number of rows."""
        (pieces, rows), (more, after) = self._before(first), self._before(stop)
        if more > pieces:
            rows, longer = divmod(after - rows, more - pieces)
            begun = self._pass(self._place(first)[0])
            counts = (rows + 1, longer), (rows, more - pieces - longer)
            yield from ((replace(begun, rows=n), times) for n, times in counts if times)

    def _before(self, index: int) -> tuple[int, int]:
        """Returns (pieces before `index`, their rows)."""
        first, tests, which = self._place(index)
        epoch, done = divmod(first, self.train.updates)
        rows = epoch * self.train.rows + done * self.train.batch + (0 if which is None else self._pass(first).rows)
        return self._begins(first) - tests * len(self.following) + (which is not None), rows

    def _walked(self) -> Iterator[tuple[list[Phase], int]]:
        first, others = self._pass(0), self._last - self.tests * len(self.following) - 1
        yield [first], 1
        if others:
            updates = max(1, round((self.updates - first.updates) / others))
            yield [replace(first, rows=min(updates * first.batch, self.train.rows))], others


def training(train: Phase, epochs: int, updates: int | None, following: tuple[Phase, ...], tests: Interval) -> Epochs | Pieces:
    """Returns `epochs` passes of `train`, a whole epoch, or `updates` of it, with `following` at every `tests` and last."""
    if updates is None and tests.updates is None:
        return Epochs(train=replace(train, epochs=epochs), epochs=epochs, following=following, every=tests.epochs)
    every = tests.updates if tests.epochs is None else tests.epochs * train.updates
    return Pieces(train=train, updates=epochs * train.updates if updates is None else updates, following=following, every=every)


_WALKED = 4
"""Most updates of a pass that are simulated."""


def shortened(phases: Phases) -> tuple[list[Phase], dict[int, tuple[int, int]], dict[tuple[int, int | None], int]]:
    """Returns phases with few updates, epochs and micro-batches, and how many each of them stands for.

    {number of a phase: (updates it stands for, passes left out)}, {(phase, micro-batch): micro-batches it stands for}.
    """
    short: list[Phase] = []
    more: dict[int, tuple[int, int]] = {}
    stands_for: dict[tuple[int, int | None], int] = {}
    walked = (one for stretch in phases.stretches for one in stretch.walked())
    kept = ((phase, times) for phase, times in walked if phase.kind is not PhaseKind.GATHER)
    for phase, times in ((phase.own, times) for phase, times in kept if not (phase.elsewhere and phase.is_turn)):
        more[len(short)] = phase.updates, times - 1
        ragged = phase.rows % phase.batch or phase.batch
        rows = phase.rows if phase.updates <= _WALKED else (_WALKED - 1) * phase.batch + ragged
        shorter, counts = _with_few_micro_batches(replace(phase, rows=rows))
        stands_for |= {(len(short), m): count for m, count in counts.items()}
        short.append(shorter)
    return short, more, stands_for


# [Note: equal micro-batches] Micro-batches of an update differ only in the rows of the last, and memory rises or falls by the
# same bytes from one to the next. So only the first (there are no gradients yet), the second, the last two and those between
# can make the highest peak, and the second stands for those between: in a forward pass, whose memory grows with each, the
# last but one is simulated, and in a backward pass, whose memory shrinks with each, the second, before those that it stands
# for are over.

_ALONE = 4
"""Most micro-batches of an update that are simulated."""


def _with_few_micro_batches(phase: Phase) -> tuple[Phase, dict[int, int]]:
    """Returns `phase` with at most `_ALONE` micro-batches per update, and {micro-batch: how many it stands for}."""
    size, batch = phase.micro_batch, min(phase.batch, phase.rows)
    count, updates = -(-batch // size), phase.updates
    if phase.kind is not PhaseKind.TRAIN or count <= _ALONE or phase.in_pairs:
        return phase, {}
    short = (_ALONE - 1) * size + (batch % size or size)
    stands_for = {update * _ALONE + 1: count - _ALONE + 1 for update in range(updates)}
    last = phase.rows - (updates - 1) * batch
    if last < batch:  # one fewer, so that the last update stays the shortest
        count = -(-last // size)
        stands_for[(updates - 1) * _ALONE + 1] = max(1, count - _ALONE + 2)
        last = (_ALONE - 2) * size + (last % size or size) if count >= _ALONE else last
    else:
        last = short
    return replace(phase, rows=(updates - 1) * short + last, batch=short), stands_for
