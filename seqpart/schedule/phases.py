"""The phases of a run as a lazy sequence: 200 million epochs take no more memory than two."""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, overload

from seqpart.schedule.phase import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs:
    """A stretch of phases: `epochs` passes of `train`, with `behind` after each `every`-th of them and after the last."""

    train: Phase
    epochs: int
    behind: tuple[Phase, ...]
    every: int | None = None

    def __len__(self) -> int:
        return self.epochs + (self.rounds + 1) * len(self.behind)

    @property
    def rounds(self) -> int:
        """How often `behind` comes, without the last time."""
        return 0 if self.every is None else max(0, self.epochs - 1) // self.every

    def _place(self, index: int) -> tuple[int, int]:
        """Returns (passes of `train` before the current round, its phases before `index`); a round ends with `behind`."""
        chunk = self.every if self.every is not None and self.rounds else self.epochs
        round_ = min(index // max(1, chunk + len(self.behind)), self.rounds)
        return round_ * chunk, index - round_ * (chunk + len(self.behind))

    def __getitem__(self, index: int) -> Phase:
        before, at = self._place(index)
        passes = self._passes_from(before)
        return replace(self.train, epoch=before + at + 1) if at < passes else self.behind[at - passes]

    def _passes_from(self, before: int) -> int:
        """Returns how many passes of `train` follow one another after the first `before`."""
        left = self.epochs - before
        return left if self.every is None else min(self.every, left)

    def _counts(self, index: int) -> list[int]:
        """Returns how often `train`, and each of `behind`, comes before `index`."""
        before, at = self._place(index)
        passes, rounds = self._passes_from(before), before // self.every if self.every is not None else 0
        return [before + min(at, passes), *(rounds + (at > passes + j) for j in range(len(self.behind)))]

    def stands(self, index: int) -> tuple[int, int | None]:
        """Returns (passes of `train` before `index`, which of `behind` it is; None if it is a pass of `train`)."""
        before, at = self._place(index)
        passes = self._passes_from(before)
        return (before + at, None) if at < passes else (before + passes, at - passes)

    def index_of(self, epochs: int, behind: int | None) -> int:
        """Inverse of `stands`; gives the next pass of `train` if no `behind` comes after so many epochs."""
        rounds = self.rounds if self.every is None else min(epochs // self.every, self.rounds)
        if behind is None or (epochs < self.epochs and (self.every is None or epochs % self.every or not epochs)):
            return epochs + rounds * len(self.behind)
        return epochs + (self.rounds if epochs == self.epochs else rounds - 1) * len(self.behind) + behind

    def counted(self, first: int, stop: int) -> Iterator[tuple[Phase, int]]:
        """Yields each different phase from `first` to `stop`, and how often it comes; epochs count as one phase."""
        train, *behind = (stop - start for start, stop in zip(self._counts(first), self._counts(stop), strict=True))
        if train:
            yield replace(self.train, epoch=self._counts(first)[0] + 1), train
        yield from ((phase, times) for phase, times in zip(self.behind, behind, strict=True) if times)

    def trainings(self) -> Iterator[tuple[int, Phase]]:
        """Yields the last pass of `train`, with its number in the stretch."""
        if self.epochs:
            yield len(self) - len(self.behind) - 1, self.train

    def walked(self) -> Iterator[tuple[Phase, int]]:
        """Yields the first two passes and the phases after them, each with how many phases of the stretch it stands for."""
        for epoch, stands_for in ((1, 1), (2, self.epochs - 1))[: self.epochs]:
            yield replace(self.train, epoch=epoch), stands_for
            if epoch == 1 and self.rounds:
                yield from ((phase, self.rounds) for phase in self.behind)
        yield from ((phase, 1) for phase in self.behind)


class Stretch(Protocol):
    """Phases that belong together, counted from 0; the methods are described at `Epochs`."""

    @property
    def train(self) -> Phase: ...
    @property
    def epochs(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Phase: ...
    def stands(self, index: int) -> tuple[int, int | None]: ...
    def index_of(self, epochs: int, behind: int | None) -> int: ...
    def counted(self, first: int, stop: int) -> Iterator[tuple[Phase, int]]: ...
    def trainings(self) -> Iterator[tuple[int, Phase]]: ...
    def walked(self) -> Iterator[tuple[Phase, int]]: ...


class Phases(Sequence[Phase]):
    """The phases of several stretches, one after the other; or a slice of them, from phase number `start` to `stop`."""

    def __init__(self, stretches: Iterable[Stretch], start: int = 0, stop: int | None = None) -> None:
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

    def number_of(self, which: int, epochs: int, behind: int | None) -> int:
        return self._begins(which) + self.stretches[which].index_of(epochs, behind)

    def of_stage(self, stage: int) -> "Phases":
        return Phases(stretch for stretch in self.stretches if stretch.train.stage == stage)


def counted(phases: Sequence[Phase]) -> Iterator[tuple[Phase, int]]:
    """Yields each different phase, roughly in order, and how often it comes: a stretch's epochs count as its first one."""
    return phases.counted() if isinstance(phases, Phases) else ((phase, 1) for phase in phases)


def last_trainings(phases: Sequence[Phase]) -> dict[tuple[int, int], int]:
    """Returns the number of the last phase that trains a partition, by (stage, partition)."""
    trainings = phases.trainings() if isinstance(phases, Phases) else enumerate(phases)
    return {(phase.stage, p): number for number, phase in trainings for p in phase.partitions if phase.trains(p)}
