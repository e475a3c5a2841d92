"""Which of many cases run in the README's test command; the others are marked slow, and run in .ci/run too."""

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
