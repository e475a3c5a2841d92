"""Data sets as they come from the user, checked, and turned into the rows of boundary 0.

Rows are streamed home a chunk at a time, so a data set larger than the limit is no different from a small one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from seqpart.errors import DataError

ROWS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Split:
    """Training or test rows. `open` starts a new pass over them: float tensors (some rows, *shape), in order."""

    name: str
    count: int
    shape: tuple[int, ...]
    labels: torch.Tensor
    """(count,) int64 classes, or floats to regress."""
    open: Callable[[], Iterable[torch.Tensor]]


def as_split(data: object, name: str) -> Split:
    """A Split, a pair (x, y) of tensors or arrays, or a map-style data set of (x, y) items, as a Split.

    Raises DataError for anything else, for no rows, for rows of different shapes, and for x and y of different length.
    """
    if isinstance(data, Split):
        split = data
    elif isinstance(data, tuple | list) and len(data) == 2 and all(hasattr(part, "shape") for part in data):
        split = _from_pair(data[0], data[1], name)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        split = _from_items(data, name)
    else:
        raise DataError(
            f"{name} data: expected a pair (x, y) of tensors or arrays, or a data set with len() and [i]; "
            f"found {type(data).__name__}."
        )
    if not split.count:
        raise DataError(f"{name} data: the set is empty. Give at least one row.")
    return split


def _from_pair(x: Any, y: Any, name: str) -> Split:
    labels = _as_labels(y, name)
    if len(x) != len(labels):
        raise DataError(f"{name} data: {len(x)} rows of x and {len(labels)} labels; the numbers must be equal.")

    def passes() -> Iterator[torch.Tensor]:
        for start in range(0, len(x), ROWS_AT_ONCE):
            yield torch.as_tensor(x[start : start + ROWS_AT_ONCE])

    return Split(name=name, count=len(labels), shape=tuple(int(n) for n in x.shape[1:]), labels=labels, open=passes)


def _from_items(items: Any, name: str) -> Split:
    if not len(items):
        raise DataError(f"{name} data: the set is empty. Give at least one row.")
    first = _item(items, 0, name)[0]
    targets = getattr(items, "targets", None)
    labels = (
        targets if targets is not None and len(targets) == len(items) else [_item(items, i, name)[1] for i in range(len(items))]
    )

    def passes() -> Iterator[torch.Tensor]:
        for start in range(0, len(items), ROWS_AT_ONCE):
            rows = [_item(items, i, name)[0] for i in range(start, min(start + ROWS_AT_ONCE, len(items)))]
            odd = next((row for row in rows if row.shape != first.shape), None)
            if odd is not None:
                raise DataError(
                    f"{name} data: row shapes differ: {tuple(first.shape)} in row 0 and {tuple(odd.shape)} after row {start}. "
                    "Resize or crop them to one shape."
                )
            yield torch.stack(rows)

    return Split(name=name, count=len(items), shape=tuple(first.shape), labels=_as_labels(labels, name), open=passes)


def _item(items: Any, index: int, name: str) -> tuple[torch.Tensor, Any]:
    try:
        x, y = items[index]
        return torch.as_tensor(x), y
    except Exception as error:
        raise DataError(f"{name} data: item {index} is not a pair (tensor, label): {type(error).__name__}: {error}") from error


def _as_labels(labels: Any, name: str) -> torch.Tensor:
    if isinstance(labels, Sequence):
        labels = [label.item() if isinstance(label, torch.Tensor) else label for label in labels]
    try:
        tensor = torch.as_tensor(np.asarray(labels) if not isinstance(labels, torch.Tensor) else labels).detach().cpu()
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} labels: expected one number for each row: {error}") from None
    if tensor.ndim != 1:
        raise DataError(f"{name} labels: expected shape (rows,), found {tuple(tensor.shape)}.")
    if tensor.is_floating_point():
        if not bool(tensor.isfinite().all()):
            raise DataError(f"{name} labels: NaN or infinity in row {int((~tensor.isfinite()).nonzero()[0])}.")
        return tensor.to(torch.float32).clone()
    return tensor.to(torch.int64).clone()


def count_classes(train: Split, test: Split) -> int:
    """Number of classes of integer labels, from 0 up; 0 for labels to regress.

    Raises DataError for a negative label, a single class, and a test label that training never saw.
    """
    if train.labels.is_floating_point():
        return 0
    seen = torch.unique(train.labels)
    if int(seen[0]) < 0:
        raise DataError(f"{train.name} labels: found class {int(seen[0])}; classes count from 0.")
    if len(seen) == 1:
        raise DataError(f"{train.name} labels: every row has class {int(seen[0])}. Training needs at least two classes.")
    unknown = test.labels[~torch.isin(test.labels, seen)]
    if len(unknown):
        raise DataError(f"{test.name} labels: class {int(unknown[0])} does not occur in the training rows.")
    return int(seen[-1]) + 1


def refuse_mismatch(train: Split, test: Split) -> None:
    if train.shape != test.shape:
        raise DataError(f"training rows have shape {train.shape} and test rows {test.shape}; they must be equal.")


def pour(split: Split, append: Callable[[torch.Tensor], None]) -> None:
    """Stream every row of `split` into `append`. Raises DataError, naming the row, at the first NaN or infinity."""
    done = 0
    for rows in split.open():
        if not rows.is_floating_point():
            rows = rows.to(torch.float32)
        if tuple(rows.shape[1:]) != split.shape:
            raise DataError(f"{split.name} data: rows from {done} on have shape {tuple(rows.shape[1:])}, not {split.shape}.")
        bad = ~rows.flatten(1).isfinite().all(1)
        if bool(bad.any()):
            raise DataError(
                f"{split.name} data: NaN or infinity in row {done + int(bad.nonzero()[0])}. "
                "Clean the data: one such row spoils every weight."
            )
        append(rows.to(torch.float32))
        done += len(rows)
    if done != split.count:
        raise DataError(f"{split.name} data: {split.count} rows were announced and {done} came.")
