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


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs:
    """A stretch of phases: `epochs` passes of `train`, with `following` after each `every`-th of them and after the last."""

    train: Phase
    epochs: int
    following: tuple[Phase, ...]
    every: int | None = None

    def __len__(self) -> int:
        return self.epochs + (self.rounds + 1) * len(self.following)

    @property
    def rounds(self) -> int:
        """How often `following` comes, without the last time."""
        return _times(self.epochs, self.every)

    def _place(self, index: int) -> tuple[int, int]:
        """Returns (passes of `train` before the current round, its phases before `index`); a round ends with `following`."""
        chunk = self.every if self.every is not None and self.rounds else self.epochs
        round_ = min(index // max(1, chunk + len(self.following)), self.rounds)
        return round_ * chunk, index - round_ * (chunk + len(self.following))

    def __getitem__(self, index: int) -> Phase:
        before, at = self._place(index)
        passes = self._passes_from(before)
        return replace(self.train, epoch=before + at + 1) if at < passes else self.following[at - passes]

    def _passes_from(self, before: int) -> int:
        """Returns how many passes of `train` follow one another after the first `before`."""
        left = self.epochs - before
        return left if self.every is None else min(self.every, left)

    def _counts(self, index: int) -> list[int]:
        """Returns how often `train`, and each of `following`, comes before `index`."""
        before, at = self._place(index)
        passes, rounds = self._passes_from(before), before // self.every if self.every is not None else 0
        return [before + min(at, passes), *(rounds + (at > passes + j) for j in range(len(self.following)))]

    def stands(self, index: int) -> tuple[int, int | None]:
        """Returns (passes of `train` before `index`, which of `following` it is; None if it is a pass of `train`)."""
        before, at = self._place(index)
        passes = self._passes_from(before)
        return (before + at, None) if at < passes else (before + passes, at - passes)

    def index_of(self, epochs: int, following: int | None) -> int:
        """Inverse of `stands`; gives the next pass of `train` if no `following` comes after so many epochs."""
        rounds = self.rounds if self.every is None else min(epochs // self.every, self.rounds)
        if following is None or (epochs < self.epochs and (self.every is None or epochs % self.every or not epochs)):
            return epochs + rounds * len(self.following)
        return epochs + (self.rounds if epochs == self.epochs else rounds - 1) * len(self.following) + following

    def counted(self, first: int, stop: int) -> Iterator[tuple[Phase, int]]:
        """Yields each different phase from `first` to `stop`, and how often it comes; epochs count as one phase."""
        train, *following = (stop - start for start, stop in zip(self._counts(first), self._counts(stop), strict=True))
        if train:
            yield replace(self.train, epoch=self._counts(first)[0] + 1), train
        yield from ((phase, times) for phase, times in zip(self.following, following, strict=True) if times)

    def trainings(self) -> Iterator[tuple[int, Phase]]:
        """Yields the last pass of `train`, with its number in the stretch."""
        if self.epochs:
            yield len(self) - len(self.following) - 1, self.train

    def walked(self) -> Iterator[tuple[Phase, int]]:
        """Yields the first two passes and the phases after them, each with how many phases of the stretch it stands for."""
        for epoch, stands_for in ((1, 1), (2, self.epochs - 1))[: self.epochs]:
            yield replace(self.train, epoch=epoch), stands_for
            if epoch == 1 and self.rounds:
                yield from ((phase, self.rounds) for phase in self.following)
        yield from ((phase, 1) for phase in self.following)


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
        """Yields the last pass of `train` of every stretch, with its number among all phases."""
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


def last_trainings(phases: Sequence[Phase]) -> dict[tuple[int, int], int]:
    """Returns the number of the last phase that trains a partition, by (stage, partition)."""
    trainings = phases.trainings() if isinstance(phases, Phases) else enumerate(phases)
    return {(phase.stage, p): number for number, phase in trainings for p in phase.partitions if phase.trains(p)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
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
    def rounds(self) -> int:
        """Number of rounds in an epoch."""
        return -(-self.train.updates // self.local)

    @property
    def _per_round(self) -> int:
        return len(self.turns) + 2

    @property
    def _per_epoch(self) -> int:
        return self.rounds * self._per_round

    @property
    def _tests(self) -> int:
        """How often `following` comes, without the last time."""
        return _times(self.epochs, self.every)

    def __len__(self) -> int:
        return self.epochs * self._per_epoch + (self._tests + 1) * len(self.following)

    def __getitem__(self, index: int) -> Phase:
        epoch, at = self._place(index)
        if epoch == self.epochs or at >= self._per_epoch:
            return self.following[at - self._per_epoch if epoch < self.epochs else at]
        round_, which = divmod(at, self._per_round)
        number = epoch * self.rounds + round_ + 1
        if which == 0:
            return replace(self.split, epoch=number)
        return self._turn(which - 1, epoch, round_) if which <= len(self.turns) else replace(self.merge, epoch=number)

    def _turn(self, part: int, epoch: int, round_: int) -> Phase:
        turn, done = self.turns[part], round_ * self.local
        before = done * turn.batch
        return replace(
            turn, epoch=epoch + 1,
            within=replace(turn.within, done=done, updates_of_epoch=turn.updates, skips=turn.within.skips + before),
            rows=min(self.local * turn.batch, turn.rows - before),
        )  # fmt: skip

    def _place(self, index: int) -> tuple[int, int]:
        """Returns (epochs that are over, phases since). After the last epoch the phases are `following`; an earlier epoch
        includes the phases of `following` after it."""
        every = self.every if self.every is not None and self._tests else max(1, self.epochs)
        chunk = every * self._per_epoch + len(self.following)
        before = min(index // chunk, self._tests)
        index -= before * chunk
        here = min(every, self.epochs - before * every)
        epoch = min(index // self._per_epoch, here)
        if epoch == here and before * every + here < self.epochs:
            epoch -= 1  # the phases after it still belong to it
        return before * every + epoch, index - epoch * self._per_epoch

    def stands(self, index: int) -> tuple[int, int | None]:
        """Returns (epochs that are over before `index`, phases since; None: none)."""
        epoch, at = self._place(index)
        return epoch, at if at or epoch == self.epochs else None

    def index_of(self, epochs: int, following: int | None) -> int:
        """Inverse of `stands`."""
        tests = 0 if self.every is None else min(epochs // self.every, self._tests)
        return epochs * self._per_epoch + tests * len(self.following) + (following or 0)

    def counted(self, first: int, stop: int) -> Iterator[tuple[Phase, int]]:
        """Yields each different phase from `first` to `stop`, and how often it comes; rounds count as one, except for the last
        of an epoch."""
        last = (self.rounds - 1) * self._per_round
        counts = [there - here for here, there in zip(self._counts(first), self._counts(stop), strict=True)]
        for which in range(self._per_round):
            for index, times in ((which, counts[2 * which]), (last + which, counts[2 * which + 1])):
                if times:
                    yield self[index], times
        yield from (
            (phase, times) for phase, times in zip(self.following, counts[2 * self._per_round :], strict=True) if times
        )  # fmt: skip

    def _counts(self, index: int) -> list[int]:
        """Returns how often each phase comes before `index`: for each phase of a round, in rounds that are not the last of an
        epoch, and in those that are; then for each of `following`."""
        epoch, at = self._place(index)
        tests = 0 if self.every is None else min(epoch // self.every, self._tests)
        round_, which = divmod(min(at, self._per_epoch) if epoch < self.epochs else 0, self._per_round)
        counts = []
        for phase in range(self._per_round):
            done = round_ + (which > phase)
            counts += [epoch * (self.rounds - 1) + min(done, self.rounds - 1), epoch + max(0, done - self.rounds + 1)]
        over = at if epoch == self.epochs else max(0, at - self._per_epoch)
        return [*counts, *(tests + (over > number) for number in range(len(self.following)))]

    def trainings(self) -> Iterator[tuple[int, Phase]]:
        """Yields the last turn of each part, with its number in the stretch."""
        first = len(self) - len(self.following) - 1 - len(self.turns)
        yield from ((first + part, turn) for part, turn in enumerate(self.turns) if self.epochs)

    def walked(self) -> Iterator[tuple[Phase, int]]:
        """Yields the first two rounds and the phases after them, each with how many phases of the stretch it stands for."""
        count = self.epochs * self.rounds
        for number, stands_for in ((0, 1), (1, count - 1))[: min(count, 2)]:
            epoch, round_ = divmod(number, self.rounds)
            first = self.index_of(epoch, round_ * self._per_round)
            yield from ((self[first + which], stands_for) for which in range(self._per_round))
            if number == 0 and self._tests:
                yield from ((phase, self._tests) for phase in self.following)
        yield from ((phase, 1) for phase in self.following)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
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
    def epochs(self) -> int:
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

    def _place(self, index: int) -> tuple[int, int]:
        """Returns (first update of the last piece that begins at or before `index`, phases since)."""
        low, high = 0, self.updates - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._begins(middle) <= index else (low, middle - 1)
        epoch = self.train.updates
        first = max(low // epoch * epoch, low // self.every * self.every if self.every is not None else 0)
        return first, index - self._begins(first)

    def __getitem__(self, index: int) -> Phase:
        first, at = self._place(index)
        return self._piece(first) if at == 0 else self.following[at - 1]

    def _piece(self, first: int) -> Phase:
        """Returns the piece that begins with update number `first`, from 0."""
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

    def counted(self, first: int, stop: int) -> Iterator[tuple[Phase, int]]:
        """Yields the phases from `first` to `stop`, and how often each comes. Pieces count as one, with their average number
        of rows."""
        following = [self._tests(stop, which) - self._tests(first, which) for which in range(len(self.following))]
        pieces = stop - first - sum(following)
        if pieces:
            rows, more = divmod(self._rows(stop) - self._rows(first), pieces)
            begun = self._piece(self._place(first)[0])
            yield from ((replace(begun, rows=n), times) for n, times in ((rows + 1, more), (rows, pieces - more)) if times)
        yield from ((phase, times) for phase, times in zip(self.following, following, strict=True) if times)

    def _tests(self, index: int, which: int) -> int:
        """Returns how often number `which` of `following` comes before `index`."""
        first, at = self._place(index)
        return (first // self.every if self.every is not None else 0) + (at > which + 1)

    def _rows(self, index: int) -> int:
        """Returns the rows of all pieces before `index`."""
        first, at = self._place(index)
        epoch, done = divmod(first, self.train.updates)
        return epoch * self.train.rows + done * self.train.batch + (self._piece(first).rows if at else 0)

    def trainings(self) -> Iterator[tuple[int, Phase]]:
        """Yields the last piece, with its number in the stretch."""
        yield self._last - 1, self._piece(self._place(self._last - 1)[0])

    def walked(self) -> Iterator[tuple[Phase, int]]:
        """Yields the first piece, one that stands for all others, and the phases after them; each with how many phases of the
        stretch it stands for."""
        tests = _times(self.updates, self.every)
        pieces = self._last - tests * len(self.following)
        first = self._piece(0)
        yield first, 1
        if tests:
            yield from ((phase, tests) for phase in self.following)
        if pieces > 1:
            updates = max(1, round((self.updates - first.updates) / (pieces - 1)))
            yield replace(first, rows=min(updates * first.batch, self.train.rows)), pieces - 1
        yield from ((phase, 1) for phase in self.following)


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
