"""Several test sets by name, as one: their rows follow one another, and a pass over them reports each by its name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch.utils.data import ConcatDataset

from seqpart.data.row_types import in_type_of
from seqpart.data.source import Source
from seqpart.data.splits import Split, form_of_labels, form_of_rows
from seqpart.errors import DataError


def are_named(data: object) -> TypeGuard[Mapping[str, object]]:
    """True for a dict of data sets by name, and not of tensors: {"val": (x, y), "shifted": loader}."""
    if not isinstance(data, Mapping) or not data or not all(isinstance(name, str) for name in data):
        return False
    return not any(hasattr(part, "shape") and not isinstance(part, Split) for part in data.values()) and not any(
        isinstance(part, list) and not hasattr(next(iter(part), None), "__len__") for part in data.values()
    )


def together(data: object, read: Callable[[Any], Split], name: str, *, keeps: bool = False) -> Split:
    """Returns the rows of a set, or of several by name, as one split. read: makes a split of one. keeps: rows may be kept that
    would be read anew. Raises DataError for unlike sets."""
    if not are_named(data):
        return read(data)
    found = {}
    if empty := [own for own, part in data.items() if part is None or not own]:
        raise DataError(
            f"{name} sets: expected data sets by name; found {'no data' if empty[0] else 'no name'} for {empty[0]!r}."
        )
    for own, part in data.items():
        try:
            found[own] = read(part)
        except DataError as error:
            error.add_note(f"in the {name} set {own!r}")
            raise
    first = next(iter(found.values()))
    found = {own: in_type_of(first, split) for own, split in found.items()}
    for own, split in found.items():
        for what, form in (("rows", form_of_rows), ("labels", form_of_labels)):
            if form(split) != form(first):
                raise DataError(f"{name} sets: expected {what} of one form; found {form(first)}, and {form(split)} in {own!r}.")
    labels = torch.cat([split.labels for split in found.values()])
    one = replace(
        first, name=name, count=sum(split.count for split in found.values()), labels=labels, some=None,
        sets=tuple((own, split.count) for own, split in found.items()),
        open=lambda: chain.from_iterable(split.open() for split in found.values()),
    )  # fmt: skip
    sources = [split.source for split in found.values()]
    if all(source is None for source in sources) or (keeps and not _are_alike(sources)):
        return replace(one, source=None)
    return replace(one, source=_joined(sources, name))


def _are_alike(sources: Sequence[Any]) -> bool:
    """True for data sets with `[i]`, or loaders of them, whose items become rows in the same way."""
    kinds = [
        (source.collate, source.batch) if isinstance(source, Source) and not source.streams else None for source in sources
    ]
    return None not in kinds and all(kind == kinds[0] for kind in kinds)


def _joined(sources: Sequence[Any], name: str) -> Source:
    """Returns the source of sets that are read anew in every evaluation."""
    first: Source = sources[0]
    if not _are_alike(sources):
        raise DataError(
            f"{name} sets: those that are read again in every evaluation are data sets with len() and [i], or loaders of them "
            "with one batch_size and collate_fn. Give such, or keep their rows: cache='rows'."
        )
    count = sum(source.count for source in sources)
    return replace(first, items=ConcatDataset([source.items for source in sources]), count=count, rows=count)
