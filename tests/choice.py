"""Which of many cases run in the README's test command; the others are marked slow, and run in .ci/run too."""

import itertools
from collections.abc import Collection, Iterable, Sequence

import pytest


def only_quick(names: Iterable[str], quick: Collection[str]) -> list[object]:
    """Parameters: those of `quick` as they are, the others marked slow. Raises ValueError for a name that is none of them."""
    names = list(names)
    if missing := set(quick) - set(names):
        raise ValueError(f"no case is called {missing}")
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def in_turn(*axes: Sequence[object]) -> list[tuple[object, ...]]:
    """Parameters: each value of the longest axis once, with those of the others in turn. All combinations take minutes."""
    return [tuple(axis[n % len(axis)] for axis in axes) for n in range(max(map(len, axes)))]


def in_pairs(*axes: Sequence[object]) -> list[tuple[object, ...]]:
    """Parameters: each value of one axis meets each value of every other one. All combinations take minutes."""
    cases = list(itertools.product(*(range(len(axis)) for axis in axes)))
    chosen, left = [], {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}
    while left:
        best = max(cases, key=lambda case: len(left.intersection(itertools.combinations(enumerate(case), 2))))
        left.difference_update(itertools.combinations(enumerate(best), 2))
        chosen.append(tuple(axis[n] for axis, n in zip(axes, best, strict=True)))
    return chosen
