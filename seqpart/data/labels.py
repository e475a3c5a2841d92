"""Checks the user's labels and makes one tensor for all rows.

Several labels of a row are packed as bytes, as inputs are.

    (rows,)         one class, or one float, for each row
    (rows, ...)     whole numbers: a class for each position; floats: a vector, a mask or an image to regress to
    dict or tuple   of such tensors, for the user's own loss: boxes and their classes, two targets
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from seqpart.capture.inputs import Form, Several, as_tensor, described, form_of, nbytes_of, one_row, packed, some_rows, unpacked
from seqpart.errors import DataError, first_line
from seqpart.model.losses import LossFunction, LossName, loss_named

_ROWS_AT_ONCE = 256
_NARROW = {
    **{dtype: dtype for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)},
    torch.bool: torch.uint8,
    torch.uint16: torch.int32,
}
"""Types that labels of positions keep, because there are many labels; uint16 becomes int32, as torch has few ops for it."""


def are_several(label: object) -> bool:
    """True if the label of a row, or those of all rows, are more than one tensor: a dict, or a tuple or list with a tensor
    that has dimensions, or a Several."""
    if isinstance(label, Mapping | Several):
        return True
    return isinstance(label, tuple | list) and any(len(getattr(part, "shape", ())) > 0 for part in label)


def labels_of_rows(labels: Any, name: str) -> tuple[torch.Tensor, Form]:
    """Returns the labels of all rows, (rows, ...), or a dict or tuple of them as (rows, bytes), and the form of the bytes.

    Raises DataError for anything that cannot be labels, naming the data `name`.
    """
    if not are_several(labels):
        return as_labels(labels, name), ()
    where = f"{name} labels"
    form = form_of(labels, where, whole=True)
    counts = {len(part) for part in (labels.values() if isinstance(labels, Mapping) else labels)}
    if len(counts) > 1:
        raise DataError(f"{where}: expected equally many rows of each; found {' and '.join(map(str, sorted(counts)))}.")
    count = counts.pop()
    starts = range(0, count, _ROWS_AT_ONCE)
    return in_one((packed(some_rows(labels, slice(at, at + _ROWS_AT_ONCE)), form, where) for at in starts), count, form), form


def in_one(pieces: Iterable[torch.Tensor], count: int, form: Form) -> torch.Tensor:
    """Returns packed labels of `count` rows in one tensor. Two copies of all of them would pass a limit."""
    found, at = torch.empty(count, nbytes_of(form), dtype=torch.uint8), 0
    for piece in pieces:
        found[at : at + len(piece)] = piece
        at += len(piece)
    return found


def parts_of(labels: torch.Tensor, form: Form) -> list[torch.Tensor]:
    """Returns each of the labels that rows of bytes hold, or the labels themselves if a row has one."""
    by_place, by_name = unpacked(labels, form) if form else ([labels], dict[str, torch.Tensor]())
    return [*by_place, *by_name.values()]


def labels_of_items(labels: Sequence[Any], name: str) -> tuple[torch.Tensor, Form]:
    """Returns what `labels_of_rows` does, for a sequence with the labels of single items."""
    if not are_several(labels[0]) or not isinstance(labels[0], Mapping | tuple):
        return as_labels(labels, name), ()
    where, form = f"{name} labels: item {{}}", form_of(labels[0], f"{name} labels: item 0", whole=False)
    for number, label in enumerate(labels):
        if not are_several(label):
            raise DataError(f"{where.format(number)}: expected several labels, as item 0 has; found {type(label).__name__}.")
    return torch.cat([packed(one_row(label), form, where.format(number)) for number, label in enumerate(labels)]), form


def as_labels(labels: Any, name: str) -> torch.Tensor:
    """Returns labels (rows, ...) as int64 classes of rows, whole numbers of positions in their own narrow type, or floats.

    Raises DataError for anything else, and for NaN or infinity.
    """
    if isinstance(labels, Sequence):
        labels = [plain(label) for label in labels]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nor is it written to
            tensor = as_tensor(np.asarray(labels) if not isinstance(labels, torch.Tensor) else labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} labels: expected numbers of one shape for each row: {first_line(error)}") from None
    if tensor.is_complex():
        raise DataError(f"{name} labels: expected whole numbers (classes) or floats; found {tensor.dtype}.")
    if not tensor.ndim or not prod(tensor.shape[1:]):
        raise DataError(
            f"{name} labels: expected shape (rows,), or (rows, ...) for several numbers in a row; found {tuple(tensor.shape)}."
        )
    if not tensor.is_floating_point():
        return tensor.to(torch.int64 if tensor.ndim == 1 else _NARROW.get(tensor.dtype, torch.int64)).clone()
    tensor = tensor.to(torch.float32 if tensor.itemsize < 4 else tensor.dtype, copy=True)
    refuse_infinite(tensor, name)
    return tensor


def refuse_infinite(labels: torch.Tensor, name: str) -> None:
    """Raises DataError for floats that are not finite, naming their row."""
    for start in range(0, len(labels), _ROWS_AT_ONCE):  # a mask of all of them may be large
        finite = labels[start : start + _ROWS_AT_ONCE].isfinite().view(-1, prod(labels.shape[1:])).all(1)
        if not bool(finite.all()):
            raise DataError(f"{name} labels: NaN or infinity in row {start + int((~finite).nonzero()[0])}.")


def plain(label: Any) -> Any:
    """Returns a tensor as a number or an array, and anything else unchanged."""
    if isinstance(label, Mapping):
        return {name: plain(part) for name, part in label.items()}
    if not isinstance(label, torch.Tensor):
        return label
    label = label.detach().cpu()
    return label.item() if not label.ndim else (label.float() if label.dtype == torch.bfloat16 else label).numpy()


def loss_for(
    given: LossFunction | None, name: LossName | None, labels: torch.Tensor, form: Form, classes: int, smoothing: float
) -> LossFunction:  # fmt: skip
    """Returns the user's loss, or the one of that name with label smoothing, for labels (rows, ...) or several in a row.

    Raises DataError.
    """
    if not form:
        return given or loss_named(name, labels, classes, smoothing)
    if given is None:
        raise DataError(
            f"a row has several labels ({described(form)}), which no loss given by name takes. Give a function "
            "(output, labels) -> loss: it gets them as a dict or a tuple, as they are given."
        )
    return LossOfSeveral(given, form)


class LossOfSeveral:
    """The user's loss (output, labels) -> loss, called with the dict or tuple of labels that the rows' bytes hold."""

    takes_bytes = True
    """True: its labels are packed bytes, not numbers."""

    def __init__(self, loss: LossFunction, form: Form) -> None:
        self._loss, self._form = loss, form
        self.__qualname__ = getattr(loss, "__qualname__", type(loss).__qualname__)
        for name in ("counts", "scores"):  # optional methods of the user's loss
            if callable(own := getattr(loss, name, None)):
                setattr(self, name, lambda *given, own=own: own(*given[:-1], self._apart(given[-1])))
        for name in ("returned", "example", "of_batch", "from_layers", "row_dims", "folded"):  # of a loss of several outputs
            if hasattr(loss, name):
                setattr(self, name, getattr(loss, name))

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> Any:
        return self._loss(output, self._apart(labels))  # type: ignore[arg-type]

    def parts(self, labels: torch.Tensor) -> list[torch.Tensor]:
        return parts_of(labels, self._form)

    def _apart(self, labels: torch.Tensor) -> object:
        by_place, by_name = unpacked(labels, self._form)
        return by_name or tuple(by_place)
