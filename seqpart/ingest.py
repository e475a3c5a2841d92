"""Data sets as they come from the user, checked, and turned into the rows of boundary 0.

Rows are streamed home a chunk at a time, so a data set larger than the limit is no different from a small one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from seqpart.errors import DataError

ROWS_AT_ONCE = 256
SPARSE_CLASSES = 1000
"""Gaps in the numbers of up to so many classes cost little."""


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
    if not prod(split.shape):
        raise DataError(f"{name} data: rows of shape {split.shape} hold no numbers.")
    return split


def _from_pair(x: Any, y: Any, name: str) -> Split:
    labels = _as_labels(y, name)
    if not len(x.shape) or len(x) != len(labels):
        rows = len(x) if len(x.shape) else "no"
        raise DataError(f"{name} data: {rows} rows of x and {len(labels)} labels; the numbers must be equal.")
    if isinstance(x, np.ndarray) and x.dtype.kind not in "buif":
        raise DataError(f"{name} data: expected x to be numbers; found an array of type {x.dtype}.")

    def passes() -> Iterator[torch.Tensor]:
        for start in range(0, len(x), ROWS_AT_ONCE):
            rows = x[start : start + ROWS_AT_ONCE]
            # A copy: torch warns of arrays that it may not write to, such as memory-mapped ones.
            yield torch.as_tensor(rows if isinstance(rows, torch.Tensor) else np.array(rows))

    return Split(name=name, count=len(labels), shape=tuple(int(n) for n in x.shape[1:]), labels=labels, open=passes)


def _from_items(items: Any, name: str) -> Split:
    if not len(items):
        raise DataError(f"{name} data: the set is empty. Give at least one row.")
    first = _item(items, 0, name)[0]
    targets = getattr(items, "targets", None)
    # A target_transform changes what items say and leaves `targets` as it was.
    if targets is None or len(targets) != len(items) or getattr(items, "target_transform", None) is not None:
        targets = [_item(items, i, name)[1] for i in range(len(items))]

    def passes() -> Iterator[torch.Tensor]:
        for start in range(0, len(items), ROWS_AT_ONCE):
            rows = [_item(items, i, name)[0] for i in range(start, min(start + ROWS_AT_ONCE, len(items)))]
            odd = next((i for i, row in enumerate(rows) if row.shape != first.shape), None)
            if odd is not None:
                raise DataError(
                    f"{name} data: row shapes differ: {tuple(first.shape)} in row 0 and {tuple(rows[odd].shape)} in row "
                    f"{start + odd}. Resize or crop them to one shape (--image-size for --data folder:DIR)."
                )
            yield torch.stack(rows)

    return Split(name=name, count=len(items), shape=tuple(first.shape), labels=_as_labels(targets, name), open=passes)


def _item(items: Any, index: int, name: str) -> tuple[torch.Tensor, Any]:
    try:
        item = items[index]
    except Exception as error:
        raise DataError(f"{name} data: item {index} cannot be read: {type(error).__name__}: {error}.") from error
    try:
        x, y = item
        return torch.as_tensor(x), y
    except Exception as error:
        raise DataError(f"{name} data: expected item {index} to be a pair (tensor, label): {error}.") from error


def _as_labels(labels: Any, name: str) -> torch.Tensor:
    if isinstance(labels, Sequence):
        labels = [label.item() if isinstance(label, torch.Tensor) else label for label in labels]
    try:
        tensor = torch.as_tensor(np.asarray(labels) if not isinstance(labels, torch.Tensor) else labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} labels: expected one number for each row: {str(error).splitlines()[0]}") from None
    if tensor.ndim != 1:
        raise DataError(f"{name} labels: expected shape (rows,), found {tuple(tensor.shape)}.")
    if tensor.is_complex():
        raise DataError(f"{name} labels: expected whole numbers (classes) or floats; found {tensor.dtype}.")
    if tensor.is_floating_point():
        if not bool(tensor.isfinite().all()):
            raise DataError(f"{name} labels: NaN or infinity in row {int((~tensor.isfinite()).nonzero()[0])}.")
        return tensor.to(torch.float32).clone()
    return tensor.to(torch.int64).clone()


def count_classes(train: Split, test: Split) -> int:
    """Number of classes of integer labels, from 0 up; 0 for labels to regress.

    Raises DataError for a negative label, a single class, numbers far beyond the classes that occur, a test label that
    training never saw, and test labels of another kind.
    """
    if train.labels.is_floating_point() != test.labels.is_floating_point():
        raise DataError(
            f"labels differ: training has {train.labels.dtype} and test {test.labels.dtype}; give both as one type."
        )
    if train.labels.is_floating_point():
        return 0
    seen = torch.unique(train.labels)
    if int(seen[0]) < 0:
        raise DataError(f"{train.name} labels: found class {int(seen[0])}; expected classes that count from 0.")
    if len(seen) == 1:
        raise DataError(f"{train.name} labels: every row has class {int(seen[0])}. Training needs at least two classes.")
    unknown = test.labels[~torch.isin(test.labels, seen)]
    if len(unknown):
        raise DataError(
            f"{test.name} labels: class {int(unknown[0])} does not occur in the training rows. "
            "Add training rows of it, or leave its test rows out."
        )
    classes = int(seen[-1]) + 1
    if classes > max(SPARSE_CLASSES, 10 * len(seen)):
        raise DataError(
            f"{train.name} labels: found class {classes - 1} among {len(seen)} classes; number them 0 to {len(seen) - 1}. "
            "Every number costs an output."
        )
    return classes


def refuse_mismatch(train: Split, test: Split) -> None:
    if train.shape != test.shape:
        raise DataError(
            f"training rows have shape {train.shape} and test rows {test.shape}. Bring both to one shape: the same network "
            "takes them."
        )


def pour(split: Split, append: Callable[[torch.Tensor], None]) -> None:
    """Stream every row of `split` into `append`. Raises DataError, naming the row, at the first NaN or infinity."""
    done = 0
    for found in split.open():
        if found.is_complex():
            raise DataError(f"{split.name} data: expected real numbers; found {found.dtype}.")
        rows = found.to(torch.float32)  # before the check: 1e300 is infinity then
        if tuple(rows.shape[1:]) != split.shape:
            raise DataError(
                f"{split.name} data: expected rows of shape {split.shape}; found {tuple(rows.shape[1:])} from row {done} on."
            )
        bad = ~rows.flatten(1).isfinite().all(1)
        if bool(bad.any()):
            raise DataError(
                f"{split.name} data: NaN or infinity (as a 32-bit float) in row {done + int(bad.nonzero()[0])}. "
                "Clean the data: one such row spoils every weight."
            )
        append(rows)
        done += len(rows)
    if done != split.count:
        raise DataError(f"{split.name} data: expected {split.count} rows, as len() says; found {done}.")
