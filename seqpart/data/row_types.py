"""The types in which rows and labels of floats and complex numbers go to a model: those of its weights."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch

from seqpart.capture.inputs import Form, in_types, nbytes_of, repacked
from seqpart.data.labels import in_one, refuse_infinite
from seqpart.data.splits import ROWS_AT_ONCE, Split
from seqpart.model.freezing import parameters_of
from seqpart.profile.fake_mode import FakeMode


def in_type_of(like: object, rows: Split) -> Split:
    """Returns rows whose floats, labels among them, have the types that a model takes, or those that the rows `like` have.

    They become float64 if all weights of the model are of that type. Rows of 16 bits stay so if some weights are. All others
    become float32, and complex numbers stay complex.
    """
    (form, dtype), (label_form, label_type) = (rows.form, rows.dtype), (rows.label_form, rows.labels.dtype)
    if isinstance(like, Split):
        types = _types_like(like.form, like.dtype, form, dtype)
        label_types = _types_like(like.label_form, like.labels.dtype, label_form, label_type)
    else:
        parts = {id(part): (part, number) for number, part in enumerate(like if isinstance(like, list | tuple) else [like])}
        mode = FakeMode()
        found = (one for each in parts.values() for _, one in parameters_of(*each, mode))
        taken = {one.dtype for one in found if one.is_floating_point() or one.is_complex()}
        types = [_type_for(taken, one) for one in _types_of(form, dtype)]
        label_types = [_type_for({one for one in taken if one.itemsize > 2}, one) for one in _types_of(label_form, label_type)]
    if types == _types_of(form, dtype) and label_types == _types_of(label_form, label_type):
        return rows
    label_form = in_types(label_form, label_types) if label_form else ()
    labels = _labels_in(label_form, label_types[0], rows)
    if not form:
        kept = types[0] if rows.kept == dtype else rows.kept
        return replace(rows, dtype=types[0], kept=kept, labels=labels, label_form=label_form)
    if (form := in_types(form, types)) == rows.form:
        return replace(rows, labels=labels, label_form=label_form)

    def again(passes: Callable[[], Iterable[torch.Tensor]]) -> Iterator[torch.Tensor]:
        return (repacked(found, rows.form, form, f"{rows.name} data") for found in passes())

    return replace(
        rows, form=form, shape=(nbytes_of(form),), labels=labels, label_form=label_form, open=partial(again, rows.open),
        some=None if rows.some is None else partial(again, rows.some),
    )  # fmt: skip


def _types_of(form: Form, dtype: torch.dtype) -> list[torch.dtype]:
    return [one.dtype for one in form] or [dtype]


def _types_like(form: Form, dtype: torch.dtype, own: Form, own_type: torch.dtype) -> list[torch.dtype]:
    """Returns the types of (own, own_type) where they are those of the rows (form, dtype): of floats and complex numbers."""
    found, given = _types_of(form, dtype), _types_of(own, own_type)
    if len(found) != len(given):
        return given  # which is refused elsewhere
    kinds = [[(one.is_floating_point, one.is_complex) for one in types] for types in (found, given)]
    pairs = zip(found, given, *kinds, strict=True)
    return [one if kind == other and any(kind) else two for one, two, kind, other in pairs]


def _labels_in(form: Form, dtype: torch.dtype, rows: Split) -> torch.Tensor:
    """Returns the labels in another form, or of type `dtype`. Raises DataError for one that is not finite there."""
    labels = rows.labels
    if form != rows.label_form:
        pieces = torch.split(labels, ROWS_AT_ONCE)
        return in_one((repacked(piece, rows.label_form, form, f"{rows.name} labels") for piece in pieces), len(labels), form)
    if not form and dtype != labels.dtype:
        refuse_infinite(labels := labels.to(dtype), rows.name)
    return labels


def _type_for(taken: Collection[torch.dtype], dtype: torch.dtype) -> torch.dtype:
    """Returns the type for numbers of type `dtype` where these are taken."""
    wide = bool(taken) and {*taken} <= {torch.float64, torch.complex128}
    if dtype.is_complex:
        return torch.complex128 if wide else torch.complex64
    if not dtype.is_floating_point or (dtype.itemsize == 2 and dtype in taken):
        return dtype
    return torch.float64 if wide else torch.float32
