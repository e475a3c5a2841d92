"""The phases of training that is counted in updates: it is tested within epochs, or ends within one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm

from seqpart.schedule.lengths import Interval
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Epochs, Phases


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """A stretch of phases: `updates` updates of `train`, epoch after epoch, with `behind` after each `every`-th of them and
    after the last.

    `train` is a whole epoch. A piece ends at the end of an epoch, before `behind`, or with the last update.
    """

    train: Phase
    updates: int
    behind: tuple[Phase, ...]
    every: int | None = None
    """Updates between two times `behind`; None: only at the end."""

    @property
    def epochs(self) -> int:
        """Number of epochs, the last of which may be a part of one."""
        return -(-self.updates // self.train.updates)

    def __len__(self) -> int:
        return self._begins(self.updates - 1) + 1 + len(self.behind)

    def _begins(self, update: int) -> int:
        """Returns the number of phases before the piece that has `update`."""
        epoch, every = self.train.updates, self.every
        if every is None:
            return update // epoch
        return update // epoch + update // every - update // lcm(epoch, every) + len(self.behind) * (update // every)

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
        return self._piece(first) if at == 0 else self.behind[at - 1]

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
        return len(self) - len(self.behind)

    def stands(self, index: int) -> tuple[int, int | None]:
        """Returns (epochs that are over before `index`, phases since; None: none). All are over after the last piece."""
        if index >= self._last:
            return self.epochs, index - self._last
        epoch = self._place(index)[0] // self.train.updates
        since = index - self._begins(epoch * self.train.updates)
        return epoch, since or None

    def index_of(self, epochs: int, behind: int | None) -> int:
        """Inverse of `stands`."""
        return (self._last if epochs >= self.epochs else self._begins(epochs * self.train.updates)) + (behind or 0)

    def counted(self, first: int, stop: int) -> Iterator[tuple[Phase, int]]:
        """Yields the phases from `first` to `stop`, and how often each comes. Pieces count as one, with their average number
        of rows."""
        behind = [self._tests(stop, which) - self._tests(first, which) for which in range(len(self.behind))]
        pieces = stop - first - sum(behind)
        if pieces:
            rows, more = divmod(self._rows(stop) - self._rows(first), pieces)
            begun = self._piece(self._place(first)[0])
            yield from ((replace(begun, rows=n), times) for n, times in ((rows + 1, more), (rows, pieces - more)) if times)
        yield from ((phase, times) for phase, times in zip(self.behind, behind, strict=True) if times)

    def _tests(self, index: int, which: int) -> int:
        """Returns how often number `which` of `behind` comes before `index`."""
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
        tests = (self.updates - 1) // self.every if self.every is not None else 0
        pieces = self._last - tests * len(self.behind)
        first = self._piece(0)
        yield first, 1
        if tests:
            yield from ((phase, tests) for phase in self.behind)
        if pieces > 1:
            updates = max(1, round((self.updates - first.updates) / (pieces - 1)))
            yield replace(first, rows=min(updates * first.batch, self.train.rows)), pieces - 1
        yield from ((phase, 1) for phase in self.behind)


def training(train: Phase, epochs: int, updates: int | None, behind: tuple[Phase, ...], tests: Interval) -> Epochs | Pieces:
    """Returns `epochs` passes of `train`, a whole epoch, or `updates` of it, with `behind` at every `tests` and at the end."""
    if updates is None and tests.updates is None:
        return Epochs(train=replace(train, epochs=epochs), epochs=epochs, behind=behind, every=tests.epochs)
    every = tests.updates if tests.epochs is None else tests.epochs * train.updates
    return Pieces(train=train, updates=epochs * train.updates if updates is None else updates, behind=behind, every=every)


_WALKED = 4
"""Most updates of a pass that are simulated."""


def shortened(phases: Phases) -> tuple[list[Phase], dict[int, tuple[int, int]], dict[tuple[int, int | None], int]]:
    """Returns phases with few updates, epochs and micro-batches, and how many each of them stands for.

    {number of a phase: (updates it stands for, passes left out)}, {(phase, micro-batch): micro-batches it stands for}.
    """
    short: list[Phase] = []
    more: dict[int, tuple[int, int]] = {}
    stands_for: dict[tuple[int, int | None], int] = {}
    for phase, times in (pair for stretch in phases.stretches for pair in stretch.walked()):
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
