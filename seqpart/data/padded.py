"""Data whose rows are padded as they are read, whoever reads them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from seqpart.data.padding import Padding
from seqpart.data.pairs import is_pair
from seqpart.data.source import Source
from seqpart.data.splits import Split
from seqpart.errors import OptionError


class _Items:
    """A data set or a stream."""

    def __init__(self, items: Any, padding: Padding, name: str) -> None:
        self._items, self._padding, self._name = items, padding, name

    def __len__(self) -> int:
        return len(self._items)

    def __getattr__(self, name: str) -> Any:
        """`targets`, `set_epoch` and whatever else the data set says of itself."""
        if name.startswith("_"):  # of a copy that is under way, which has no _items yet
            raise AttributeError(name)
        return getattr(self._items, name)


class _Numbered(_Items):
    def __getitem__(self, index: int) -> Any:
        return self._padding.of_item(self._items[index], f"{self._name} data: item {index}")


class _Streamed(_Items):
    def __iter__(self) -> Iterator[Any]:
        for index, item in enumerate(self._items):
            yield self._padding.of_item(item, f"{self._name} data: item {index}")


@dataclass(frozen=True, slots=True)
class _Collated:
    """A collate_fn."""

    collate: Callable[[list[Any]], Any]
    padding: Padding
    name: str

    def __call__(self, items: list[Any]) -> Any:
        return self.padding.of_batch(self.collate(items), f"{self.name} data")


def padded(data: Any, name: str, padding: Padding | None) -> Any:
    """A pair, or a data set with [i], with rows of one length; what is neither is left to who refuses it.

    Raises OptionError for rows that have one length already.
    """
    if padding is None:
        return data
    if isinstance(data, Split):
        raise OptionError(f"padding: the rows of this {name} data have one length. Leave it out.")
    if is_pair(data):
        return padding.of_batch(data, f"{name} data")
    return _Numbered(data, padding, name) if hasattr(data, "__getitem__") and hasattr(data, "__len__") else data


def padded_source(source: Source, padding: Padding | None) -> Source:
    if padding is None:
        return source
    source = replace(source, padded=repr(padding))
    if source.collate is not None:
        return replace(source, collate=_Collated(source.collate, padding, source.name))
    return replace(source, items=(_Streamed if source.streams else _Numbered)(source.items, padding, source.name))
