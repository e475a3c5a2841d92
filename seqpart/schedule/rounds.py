"""The phases of training in rounds: the parts of a network are cut out of it, trained in turn, and put back."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from seqpart.schedule.phase import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """A stretch of phases: `split`, each of `turns` for `local` updates, `merge`, again and again; `behind` after each
    `every`-th epoch and after the last.

    A turn is a part's pass over its rows of an epoch; all parts have equally many. An epoch has as many rounds as a turn needs,
    the last of them with the updates that are left.
    """

    split: Phase
    turns: tuple[Phase, ...]
    merge: Phase
    local: int
    epochs: int
    behind: tuple[Phase, ...]
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
        """How often `behind` comes, without the last time."""
        return 0 if self.every is None else max(0, self.epochs - 1) // self.every

    def __len__(self) -> int:
        return self.epochs * self._per_epoch + (self._tests + 1) * len(self.behind)

    def __getitem__(self, index: int) -> Phase:
        epoch, at = self._place(index)
        if epoch == self.epochs or at >= self._per_epoch:
            return self.behind[at % self._per_epoch if epoch < self.epochs else at]
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
        """Returns (epochs that are over, phases since). After the last epoch the phases are those of `behind`; an earlier epoch
        includes the phases of `behind` after it."""
        every = self.every if self.every is not None and self._tests else max(1, self.epochs)
        chunk = every * self._per_epoch + len(self.behind)
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

    def index_of(self, epochs: int, behind: int | None) -> int:
        """Inverse of `stands`."""
        tests = 0 if self.every is None else min(epochs // self.every, self._tests)
        return epochs * self._per_epoch + tests * len(self.behind) + (behind or 0)

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
            (phase, times) for phase, times in zip(self.behind, counts[2 * self._per_round :], strict=True) if times
        )  # fmt: skip

    def _counts(self, index: int) -> list[int]:
        """Returns how often each phase comes before `index`: for each phase of a round, in rounds that are not the last of an
        epoch, and in those that are; then for each of `behind`."""
        epoch, at = self._place(index)
        tests = 0 if self.every is None else min(epoch // self.every, self._tests)
        round_, which = divmod(min(at, self._per_epoch) if epoch < self.epochs else 0, self._per_round)
        counts = []
        for phase in range(self._per_round):
            done = round_ + (which > phase)
            counts += [epoch * (self.rounds - 1) + min(done, self.rounds - 1), epoch + max(0, done - self.rounds + 1)]
        over = at if epoch == self.epochs else max(0, at - self._per_epoch)
        return [*counts, *(tests + (over > number) for number in range(len(self.behind)))]

    def trainings(self) -> Iterator[tuple[int, Phase]]:
        """Yields the last turn of each part, with its number in the stretch."""
        first = len(self) - len(self.behind) - 1 - len(self.turns)
        yield from ((first + part, turn) for part, turn in enumerate(self.turns) if self.epochs)

    def walked(self) -> Iterator[tuple[Phase, int]]:
        """Yields the first two rounds and the phases after them, each with how many phases of the stretch it stands for."""
        count = self.epochs * self.rounds
        for number, stands_for in ((0, 1), (1, count - 1))[: min(count, 2)]:
            epoch, round_ = divmod(number, self.rounds)
            first = self.index_of(epoch, round_ * self._per_round)
            yield from ((self[first + which], stands_for) for which in range(self._per_round))
            if number == 0 and self._tests:
                yield from ((phase, self._tests) for phase in self.behind)
        yield from ((phase, 1) for phase in self.behind)
