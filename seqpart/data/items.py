"""Brings the user's items to one form: a label for each, and inputs and labels of their own where they are single numbers.

Below this module every row has a label: a zero, which no loss gets, where it came without; numbers are one row, or a Several.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from seqpart.capture.inputs import Several, dims_of, is_several, takes_several
from seqpart.data.generators import generators_kept
from seqpart.data.source import ChangedItems, ChangedStream
from seqpart.data.splits import Split, is_pair, x_and_y
from seqpart.data.test_sets import are_named


def with_zeros(data: Any, labelled: bool = False) -> tuple[Any, bool]:
    """Returns data, or several sets by name, with a 0 as the label of each row, and true; data that have labels, or are to have
    them (`labelled`), as they are, and false."""
    if labelled:
        return data, False
    if are_named(data):
        found = {name: with_zeros(part) for name, part in data.items()}
        return {name: part for name, (part, _) in found.items()}, any(bare for _, bare in found.values())
    if isinstance(data, tuple) and _is_alone(data) and is_several(data[0]) and not isinstance(data[0], Mapping):
        return (data[0], np.zeros(len(data[0][0]), np.int64)), True
    if not _is_bare(data):
        return data, False
    if isinstance(data, torch.Tensor | np.ndarray):
        return (data if len(data.shape) > 1 else (data,), np.zeros(len(data), np.int64)), True
    if isinstance(data, Mapping):
        return (dict(data), np.zeros(len(next(iter(data.values()))), np.int64)), True
    changed = _with_zero_labels(data, out_of_one)
    if isinstance(data, DataLoader) and data.collate_fn is not default_collate:
        object.__setattr__(changed, "collate_fn", partial(_collated, data.collate_fn))
    return changed, True


def without_labels(data: Any) -> Any:
    """Returns data with a 0 as the label of each row, in the place of its own, which what a collate_fn makes keeps."""
    data, bare = with_zeros(data)
    if bare or (isinstance(data, DataLoader) and data.collate_fn is not default_collate):
        return data
    if isinstance(data, Mapping) or is_pair(data):
        x, _ = x_and_y(data, "")
        part = x if hasattr(x, "shape") else next(iter(x.values() if isinstance(x, Mapping) else x))
        return x, np.zeros(len(part), np.int64)
    return data if isinstance(data, Split | str | tuple) else _with_zero_labels(data, lambda item: x_and_y(item, "")[0])


def _with_zero_labels(data: Any, x_of: Callable[[Any], Any]) -> Any:
    """Returns a data set, a stream or a loader of (x, 0). x_of: makes x of an item."""

    def changed(item: Any, _: int) -> tuple[Any, int]:
        x = x_of(item)
        return Several((x,)) if dims_of(x) == 0 else x, 0

    return change_items(data, changed, lambda count: np.zeros(count, np.int64))


def with_inputs(data: Any, model: object, loss: object = None) -> Any:
    """Returns data, a batch, or several sets by name, in which numbers are inputs and labels of their own, as they come to
    `model` and `loss` in a plain loop: x of shape (rows,), items (id, label), (user, item, rating) if the model takes several
    inputs, and (x, (age, sex)) for a loss that is a function of the user's. Other data as they are."""
    if are_named(data):
        return {name: with_inputs(part, model, loss) for name, part in data.items()}
    if not isinstance(model, nn.Module | None) or data is None or isinstance(data, Split | str):
        return data
    if is_pair(data):
        return ((data[0],), data[1]) if len(getattr(data[0], "shape", ())) == 1 else data
    if isinstance(data, tuple):
        return data
    if isinstance(data, DataLoader) and data.collate_fn is not default_collate:  # it makes tensors of them
        return data
    own = callable(loss) and not str(loss.__module__).startswith("torch.")
    change = partial(_with_numbers, several=takes_several(model), own_loss=own)
    item = _first_item(data.dataset if isinstance(data, DataLoader) else data, default_collate)
    if (changed := change(item)) is item:
        return data
    targets = (lambda _: None) if isinstance(changed[1], Several) else None  # those of the data set are no labels of their own
    return change_items(data, lambda item, _: change(item), targets)


def _with_numbers(item: Any, *, several: bool, own_loss: bool) -> Any:
    """Returns an item whose x is a number, or with `several` numbers, as one with inputs of their own; and with `own_loss` a
    tuple of numbers as labels of their own. Others unchanged."""
    if not isinstance(item, tuple | list) or len(item) < 2:
        return item
    x, y = x_and_y(item, "")
    numbers = x if several and isinstance(x, tuple | list) and len(x) > 1 else (x,)
    alone = not any(map(dims_of, numbers))
    labels = own_loss and isinstance(y, tuple) and len(y) > 1 and not any(map(dims_of, y))
    return (Several(numbers) if alone else x, Several(y) if labels else y) if alone or labels else item


def change_items(data: Any, change: Callable[[Any, int], Any], targets: Callable[[int], Any] | None = None) -> Any:
    """Returns a data set, a stream or a loader with each item changed. targets: makes its `targets` of their number."""
    if isinstance(data, DataLoader):
        loader = copy.copy(data)
        object.__setattr__(loader, "dataset", change_items(data.dataset, change, targets))
        return loader
    if not _has_places(data):
        return ChangedStream(data, change)
    items = ChangedItems(data, change)
    if targets is not None and hasattr(data, "targets"):
        vars(items)["targets"] = targets(len(data))
    return items


def _is_bare(data: object) -> bool:
    """True if data, or the first item of a data set or loader, has no labels: a tensor, or a dict without them."""
    if isinstance(data, torch.Tensor | np.ndarray):
        return True
    if isinstance(data, Mapping):
        return not {"label", "labels", "train"} & set(data)
    if data is None or isinstance(data, Split | str | tuple) or is_pair(data):
        return False
    item = _first_item(data.dataset if isinstance(data, DataLoader) else data, getattr(data, "collate_fn", default_collate))
    return (isinstance(item, torch.Tensor | np.ndarray | Mapping) and _is_bare(item)) or dims_of(item) == 0 or _is_alone(item)


def _has_places(items: object) -> bool:
    """True for a data set with `[i]`: torch's streams have one that fails."""
    return hasattr(items, "__getitem__") and not isinstance(items, IterableDataset)


def out_of_one(batch: Any) -> Any:
    """Returns the tensor of a batch that is a list or tuple of one, as loaders of a TensorDataset of one tensor give."""
    return batch[0] if _is_alone(batch) else batch


def _is_alone(item: object) -> bool:
    return isinstance(item, tuple | list) and len(item) == 1


def _first_item(items: Any, collate: Callable[[list[Any]], Any]) -> Any:
    """Returns the first item, or the batch that a collate_fn of its own, which may add labels, makes of it."""
    try:
        with generators_kept():
            if iter(items) is items:  # it can be read once
                return None
            item = items[0] if _has_places(items) else next(iter(items))
            return item if collate is default_collate else collate([item])
    except Exception:  # it is read again, and its error raised, where its rows are
        return None


def _collated(collate: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    """Collates items that have a 0 each, by a collate_fn of items without labels."""
    return collate([x for x, _ in items]), torch.zeros(len(items), dtype=torch.int64)


class WithoutLabels:
    """A loss (what the model returns) -> loss as one that gets labels too, and leaves them out."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self.__qualname__ = getattr(loss, "__qualname__", type(loss).__qualname__)

    def __call__(self, output: Any, labels: torch.Tensor) -> Any:
        return self._loss(output)

    def scores(self, output: Any, labels: torch.Tensor) -> None:
        """There is no accuracy without labels."""


def needs_labels(loss: object) -> bool:
    """True if a loss has a name, or is a function of more than what the model returns."""
    if loss == "model":
        return False
    if not callable(loss):
        return True
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
    except (TypeError, ValueError):
        return True
    by_place = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL)]
    return len(by_place) != 1 or by_place[0].kind is by_place[0].VAR_POSITIONAL
