"""A schedule with a look at what comes: which LOAD is next."""

from collections import deque
from collections.abc import Iterable, Iterator

from seqpart.schedule.steps import AT_HOME, Step, Verb

FARTHEST = 4096
"""Steps that are looked at; a LOAD farther away is not begun yet."""


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
        """The first LOAD ahead whose partition is not in `begun`; none behind a step that changes what is to be loaded."""
        index = 0
        passed = set(begun)
        while index < FARTHEST and (index < len(self._seen) or self._fetch()):
            step = self._seen[index]
            index += 1
            if step.verb in AT_HOME:
                return None
            if step.verb is Verb.LOAD:
                if step.partition not in passed:
                    return step
                passed.discard(step.partition)  # a second visit is another LOAD
        return None
