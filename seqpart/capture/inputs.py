"""Packs the inputs of models that take several tensors, by name or in order: each is a range of bytes in a row of bytes.

So the code that keeps, shuffles and moves rows handles one tensor. A traced model unpacks them in its first block.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import nn

from seqpart.device.pages import round_up
from seqpart.errors import DataError, first_line

_NEAR = 0.8
"""Similarity from which on a name counts as misspelled: a forward with **kwargs would accept it, and not use it."""
PADS = (
    'Rows of several lengths are padded by Trainer(..., padding=seqpart.Padding("longest")), with values={NAME: NUMBER} in it '
    "for tensors under names of your own; or by a collate_fn that calls a seqpart.Padding(LENGTH)."
)
"""The cure for rows that differ in length."""
_ALIGNED = 8
"""Tensors begin at a multiple of this many bytes, and so of every element's size."""
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor in a row's bytes: `shape` and `dtype` of one row, from byte `offset` on. name: None for inputs by place."""

    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Form = tuple[Input, ...]


class Several(tuple[Any, ...]):
    """The inputs or the labels of a row, in order, where each may be a single number."""


def forward_parameters(model: object) -> list[inspect.Parameter]:
    """The parameters of a model's forward; none of a list of blocks, or if it is not written in Python."""
    try:
        return list(inspect.signature(model.forward).parameters.values()) if isinstance(model, nn.Module) else []
    except (TypeError, ValueError):
        return []


def takes_a_dict(model: nn.Module, form: Form) -> bool:
    """True if inputs by name go to the forward of `model` as one dict, all that it asks for: forward(self, batch)."""
    names, parameters = {one.name for one in form}, forward_parameters(model)
    by_place = [one.kind in _BY_PLACE for one in parameters if one.default is one.empty]
    return len(names) > 1 and by_place == [True] and not any(one.name in names for one in parameters)


def takes_several(model: object) -> bool:
    """True if the forward of `model` cannot be called with one input alone."""
    return sum(one.default is one.empty and one.kind in _BY_PLACE for one in forward_parameters(model)) > 1


def dims_of(part: object) -> int:
    """Number of dimensions of a tensor, an array or a number; -1 of anything else."""
    if isinstance(part, Number):
        return 0
    return len(part.shape) if hasattr(part, "shape") and hasattr(part, "dtype") else -1


def is_several(x: object) -> bool:
    """True if the x of a row, or of all rows, is more than one tensor: a dict, a Several, or a tuple or list with a tensor."""
    if isinstance(x, Mapping | Several):
        return True
    dims = list(map(dims_of, x)) if isinstance(x, tuple | list) else []
    return min(dims, default=-1) >= 0 and max(dims) > 0  # numbers alone make one row


def form_of(x: object, where: str, *, whole: bool) -> Form:
    """Returns the form of the x of a row, or of all rows (`whole`) in the first dimension. Raises DataError, naming `where`."""
    found = []
    for name, tensor in _named(x):
        own = _tensor(tensor[:1] if whole and hasattr(tensor, "shape") and len(tensor.shape) else tensor, where, name)
        if whole and not own.ndim:
            raise DataError(f"{where}: {name or 'an input'} has no rows.")
        shape = tuple(own.shape[1:] if whole else own.shape)
        if not prod(shape):
            raise DataError(f"{where}: {name or 'an input'} has rows of shape {shape}, which hold no numbers.")
        found.append((name, shape, own.dtype))
    if not found:
        raise DataError(f"{where}: a row has no inputs.")
    return _placed(found)


def _placed(inputs: Iterable[tuple[str | None, tuple[int, ...], torch.dtype]]) -> Form:
    """Returns the form of inputs one behind the other."""
    found, offset = list[Input](), 0
    for name, shape, dtype in inputs:
        found.append(Input(name, shape, dtype, offset))
        offset += round_up(found[-1].nbytes, _ALIGNED)
    return tuple(found)


def in_types(form: Form, types: Iterable[torch.dtype]) -> Form:
    """Returns the form of the same inputs in other types."""
    return _placed((one.name, one.shape, dtype) for one, dtype in zip(form, types, strict=True))


def repacked(rows: torch.Tensor, form: Form, other: Form, where: str) -> torch.Tensor:
    """Returns rows of one form, (rows, bytes), in another of the same inputs. Raises what `packed` does."""
    by_place, by_name = unpacked(rows, form)
    return packed(by_name or tuple(by_place), other, where)


def nbytes_of(form: Form) -> int:
    """Returns the bytes of a packed row."""
    return round_up(form[-1].offset + form[-1].nbytes, _ALIGNED)


def packed(x: object, form: Form, where: str) -> torch.Tensor:
    """Packs rows x as (rows, bytes). Raises DataError for rows of another form, and for NaN or infinity."""
    x = in_order(x, form)
    parts = _named(x)
    if [name for name, _ in parts] != [one.name for one in form]:
        raise DataError(f"{where}: expected the inputs {described(form)}; found {', '.join(str(n) for n, _ in parts)}.")
    count = len(parts[0][1])
    rows = torch.zeros((count, nbytes_of(form)), dtype=torch.uint8)
    for (name, found), one in zip(parts, form, strict=True):
        tensor = _tensor(found, where, one.name).to(one.dtype)
        if tuple(tensor.shape) != (count, *one.shape):
            raise DataError(
                f"{where}: row shapes differ: {name or 'an input'} has {one.shape}, and {tuple(tensor.shape[1:])} elsewhere. "
                f"Cut them to one shape. {PADS}"
            )
        if not bool(tensor.isfinite().all()):
            raise DataError(
                f"{where}: NaN or infinity in {name or 'an input'}. Clean the data: one such row spoils every weight."
            )
        own = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)  # a tensor of one number may have any stride
        rows[:, one.offset : one.offset + one.nbytes] = own.view(torch.uint8).view(-1, one.nbytes)
    return rows


def refuse_misfit(model: nn.Module, form: Form, labels: str = "") -> None:
    """Raises DataError if the forward of `model` does not take the inputs of a row, or takes one under another name.

    labels: the name of the labels, if it takes them too.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # it is not written in Python
        return
    names = [one.name for one in form if one.name is not None]
    takes = [p.name for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    free = set(takes) - set(names)
    near = [word for name in names if name not in takes for word in get_close_matches(name, free, n=1, cutoff=_NEAR)]
    if not near and takes_a_dict(model, form):
        return
    try:
        places = [None] * (sum(one.name is None for one in form) if form else 1)
        signature.bind(*places, **dict.fromkeys([*names, *([labels] if labels else [])]))
        problem = "one has another name there" if near else ""
    except TypeError as error:
        problem = str(error)
    if problem:
        cure = (
            "Give each in x: a dict by name, or a tuple in order; several labels as (x, (y, w)); where rows have no labels, "
            "fit(((a, b),))."
        )
        if near:
            cure = f"Did you mean {' and '.join(near)}?"
        raise DataError(
            f"expected the inputs that {type(model).__name__} takes ({', '.join(takes)}); found {described(form)}: {problem}. "
            f"{cure}"
        )


def unpacked(rows: torch.Tensor, form: Form) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Positional and named inputs of rows (n, bytes), each as its own tensor would be."""
    args, kwargs = [], {}
    for one in form:
        flat = rows[:, one.offset : one.offset + one.nbytes].view(one.dtype)
        tensor = (torch.unflatten(flat, 1, one.shape) if one.shape else flat.squeeze(1)).contiguous()
        if one.name is None:
            args.append(tensor)
        else:
            kwargs[one.name] = tensor
    return args, kwargs


def some_rows(x: Any, rows: slice) -> object:
    return {name: part[rows] for name, part in x.items()} if isinstance(x, Mapping) else tuple(part[rows] for part in x)


def in_order(x: object, form: Form) -> object:
    """Returns the inputs of a dict in the order of `form`, if they have the same names; else `x` unchanged."""
    if not isinstance(x, Mapping) or set(x) != {one.name for one in form}:
        return x
    return {one.name: x[one.name] for one in form}


def one_row(x: object) -> object:
    """Returns the x of one row as a batch of one row."""
    parts = [(name, as_tensor(part)[None]) for name, part in _named(x)]
    return dict(parts) if isinstance(x, Mapping) else tuple(part for _, part in parts)


def _named(x: Any) -> list[tuple[str | None, Any]]:
    return [(str(name), part) for name, part in x.items()] if isinstance(x, Mapping) else [(None, part) for part in x]


def described(form: Form) -> str:
    """Describes a form: `ids (7,) int64, mask (7,) bool`."""
    parts = (f"{one.name or ''} {one.shape} {str(one.dtype).removeprefix('torch.')}".strip() for one in form)
    return ", ".join(parts) or "one tensor"


def refuse_text(part: object, where: str, name: str | None) -> None:
    """Raises DataError if the input `name` is a text, or a list of texts, instead of numbers."""
    if isinstance(part, str) or (isinstance(part, list | tuple) and part and isinstance(part[0], str)):
        raise DataError(
            f"{where}: expected numbers; {name or 'an input'} is the text {str(part)[:40]!r}. Turn texts into numbers, "
            "as a tokenizer does, and leave out what the model does not take."
        )


def as_tensor(part: Any) -> torch.Tensor:
    """Returns numbers as a tensor; an array is copied, into the machine's order of bytes, which torch asks for."""
    return torch.as_tensor(np.array(part, part.dtype.newbyteorder("=")) if isinstance(part, np.ndarray) else part)


def _tensor(part: Any, where: str, name: str | None) -> torch.Tensor:
    """Returns numbers as a tensor on the CPU."""
    refuse_text(part, where, name)
    try:
        return as_tensor(part).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        of = f" in {name}" if name else ""
        raise DataError(f"{where}: expected numbers of one shape{of}: {first_line(error)}") from None
