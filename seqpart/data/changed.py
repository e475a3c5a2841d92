"""Data sets and streams of the user, each of whose items is changed as it is read."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset


class ChangedItems:
    """A data set of `change(item, its number)` for each item."""

    def __init__(self, items: Any, change: Callable[[Any, int], Any]) -> None:
        self._items, self._change = items, change

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._change(self._items[index], index)

    def __getattr__(self, name: str) -> Any:
        """Returns the data set's own attribute: `targets`, `set_epoch` and any other."""
        if name.startswith("_"):  # an object that is being copied has no _items yet
            raise AttributeError(name)
        return getattr(self._items, name)


class ChangedStream(ChangedItems, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(self._change, self._items, itertools.count())
