"""Separates x and labels: of all rows at once, of a batch, or of an item."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

from seqpart.capture.inputs import is_several
from seqpart.data.labels import are_several
from seqpart.errors import DataError


def as_pair(data: object, said: str) -> object:
    """Returns all rows at once as (x, y) if they are a dict of tensors with `labels`, and other data unchanged.

    Raises DataError for x alone, and for a dict without labels.
    """
    if isinstance(data, torch.Tensor | np.ndarray):
        raise DataError(
            f"{said}: expected a pair (x, y) of rows and labels; found a {type(data).__name__} alone, of shape "
            f"{tuple(data.shape)}. Give (x, y), or (x, x) where rows are to come out as they went in."
        )
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, list) for part in data) and len(data[0]) > 2:
        raise DataError(
            f"{said}: expected a pair (x, y) of tensors or arrays; found two lists, of {len(data[0])} and {len(data[1])}. Give "
            "(torch.tensor(x), torch.tensor(y))."
        )
    if isinstance(data, str):
        raise DataError(f"{said}: expected a pair (x, y) of tensors or arrays, or a data set; found the text {data[:60]!r}.")
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        raise DataError(
            f"{said}: expected a pair (x, y) of tensors or arrays, or a data set; found a table of pandas. Give "
            "(table[[NAME, ...]].to_numpy(), table[NAME].to_numpy())."
        )
    if isinstance(data, Mapping) and data and all(isinstance(name, str) for name in data):
        if "train" in data and not {"label", "labels"} & set(data):
            raise DataError(f"{said}: found several data sets: {', '.join(data)}. Give one of them, as data['train'].")
        x, y = labels_apart(data, said)
        return x, y if hasattr(y, "shape") or isinstance(y, Mapping) else np.asarray(y)
    return data


def labels_apart(found: Mapping[Any, Any], said: str) -> tuple[dict[Any, Any], Any]:
    """Returns (inputs by name, labels) of a dict with `labels`, or else `label`, as data sets of Hugging Face have it."""
    name = "label" if "labels" not in found and "label" in found else "labels"
    if name not in found:
        raise DataError(
            f"{said}: expected a dict with labels beside the inputs that the model takes by name; found "
            f"{', '.join(map(str, found)) or 'an empty one'}. Name them labels, or give a pair (x, labels)."
        )
    return {other: part for other, part in found.items() if other != name}, found[name]


def is_pair(data: object) -> TypeGuard[Sequence[Any]]:
    """True if `data` is (x, y) of all rows, or of a batch."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    x, y = data
    return _are_labels(y) if hasattr(x, "shape") else is_several(x) and _labels_several(x, y)


def _are_labels(y: object) -> bool:
    """True if `y` can be the labels of all rows, beside an x that is one tensor."""
    return hasattr(y, "shape") or (are_several(y) and bool(y))


def _labels_several(x: object, y: object) -> bool:
    """True if `y` can be labels beside an x of several tensors; two items of a list may look the same, and count as items."""
    if hasattr(y, "shape"):
        return True
    return isinstance(y, Mapping) and isinstance(x, Mapping) and "labels" not in x and bool(y)


def kind_of(item: object) -> str:
    """Returns the item's type and its shape or length, in words."""
    shape = getattr(item, "shape", None)
    if shape is not None:
        return f"a {type(item).__name__} of shape {tuple(shape)}"
    return f"a {type(item).__name__}" + (f" of {len(item)}" if isinstance(item, tuple | list) else "")
