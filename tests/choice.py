"""Which of many cases run in the README's test command; the others are marked slow, and run in .ci/run too."""

from collections.abc import Collection, Iterable

import pytest


def only_quick(names: Iterable[str], quick: Collection[str]) -> list[object]:
    """Parameters: those of `quick` as they are, the others marked slow. Raises ValueError for a name that is none of them."""
    names = list(names)
    if missing := set(quick) - set(names):
        raise ValueError(f"no case is called {missing}")
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
