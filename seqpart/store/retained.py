"""Which files of a folder the checkpoints name: those are neither written over nor deleted before they are let go."""

import re
from collections.abc import Iterable
from pathlib import Path

from seqpart.files import remove
from seqpart.store.direct import explained


class RetainedFiles:
    """Names of kept files in `folder`. Whoever wants a file away asks here; a kept one goes as soon as it is let go.

    Raises StoreError where the disk fails.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: frozenset[str] = frozenset()
        self._unwanted: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def keep(self, names: Iterable[str]) -> None:
        """From now on these are kept and no others."""
        self._names = frozenset(names)
        for name in self._unwanted - self._names:
            self.remove(name)
        self._unwanted &= self._names

    def remove(self, name: str) -> None:
        """Delete `name`, now or when it is let go."""
        if name in self._names:
            self._unwanted.add(name)
        else:
            try:
                remove(self._folder / name)
            except OSError as error:
                raise explained(error, self._folder / name) from None

    def sweep(self, ours: re.Pattern[str], used: Iterable[str]) -> None:
        """Remove what a killed run left here beside what is used; `ours` matches the names that runs give."""
        found = {path.name for path in self._folder.iterdir() if ours.fullmatch(path.name)}
        for name in found.difference(used):
            self.remove(name)
