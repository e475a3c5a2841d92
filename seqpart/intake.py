"""What the user gives as data, made into rows once: whatever runs afterwards gets a `Split`.

`fit`, `plan` and `evaluate`, sessions, `verify` and the command all come through here.
"""

from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from seqpart.capture.inputs import Form, in_order
from seqpart.data.items import out_of_one, with_zeros
from seqpart.data.loaders import first_batch, for_data, test_rows, training_rows, with_loader
from seqpart.data.mixing import mixed
from seqpart.data.padding import Padding, padded
from seqpart.data.reader import WINDOW
from seqpart.data.source import Source
from seqpart.data.splits import Split, as_pair, as_split, first_rows, is_pair
from seqpart.data.test_sets import together
from seqpart.errors import DataError
from seqpart.fields import values_of
from seqpart.settings import Settings
from seqpart.store.row_file import RowLayout

C = TypeVar("C", bound=Settings)


def rows_of(
    train: object, test: object, settings: C, padding: Padding | None = None, *, labelled: bool = True
) -> tuple[Split, Split, C]:
    """Returns the training rows, the test rows, and the settings with the batch size and order of a loader.

    train, test: pairs (x, y), data sets, streams or loaders; test may be None. labelled: False if the loss needs no labels: x
    alone may be given too. Raises DataError, and OptionError for settings that these rows contradict.
    """
    if labelled:
        _refuse_labels_as_test(train, test)
    (train, one), (test, other) = with_zeros(train, labelled), with_zeros(test, labelled)
    padding, method = for_data(padding, (train, test)), settings.methods[0]
    rows = training_rows(train, settings, padding=padding, whole=method.alone)
    if settings.mixup or settings.cutmix:
        rows = training_rows(mixed(train, rows, settings), settings, padding=padding)
    if isinstance(rows.source, Source):
        method.refuse_source(rows.source)
    settings = with_loader(settings, rows)
    read = partial(test_rows, train=rows, settings=settings, padding=padding, whole=settings.tests_in_turn)
    tests = together(test, read, "test")
    if one or other:
        rows, tests = replace(rows, labelled=False), replace(tests, labelled=False)
    return rows, tests, settings


def rows_to_evaluate(data: object, settings: Settings, padding: Padding | None = None, *, labelled: bool = True) -> Split:
    """Returns the rows of an evaluation, with all their labels."""
    data, bare = with_zeros(data, labelled)
    padding = for_data(padding, (data,))
    read = partial(training_rows, settings=settings, name="evaluation", padding=padding, whole=True)
    return replace(together(data, read, "evaluation", keeps=True), labelled=not bare)


def kept_rows(data: object, settings: Settings, padding: Padding | None, *, labelled: bool = True) -> Split:
    """Returns the rows of an evaluation within a session, with one draw of each row kept. padding: with its length."""
    settings = replace(settings, cache="rows")
    read = partial(training_rows, settings=settings, name="evaluation", padding=padding, whole=True)
    return together(with_zeros(data, labelled)[0], read, "evaluation")


def tested_on_first(train: Split, count: int) -> Split:
    """Returns the first `count` training rows as test rows."""
    rows = replace(first_rows(train, count), name="test")
    if not isinstance(source := train.source, Source):
        return rows
    return replace(rows, source=replace(source, name="test", count=rows.count, rows=rows.count, goes_on=source.streams))


def batch_rows(
    batch: object, name: str = "the batch", padding: Padding | None = None, form: Form = (), *, labelled: bool = True
) -> Split:  # fmt: skip
    """Returns the rows of one batch: (x, y), several tensors with the labels last, or a dict with `labels`. Raises DataError.

    form: the form of the example's rows. labelled: False if they have no labels.
    """
    batch = as_pair(with_zeros(batch if labelled else out_of_one(batch), labelled)[0], name)
    if is_pair(batch):
        batch = batch if padding is None else padding.of_batch(batch, name)
        batch = in_order(batch[0], form), batch[1]
    return as_split(padded(batch, name, padding) if not isinstance(batch, tuple) else batch, name)


def largest_batch(
    example: object, settings: Settings, padding: Padding | None = None, *, labelled: bool = True
) -> Split:  # fmt: skip
    """Returns the first rows of a session's example, as many as a batch may have. Raises DataError if it has fewer."""
    (batch_size,), where = values_of(settings.batch_size), "the example"
    example, bare = with_zeros(example, labelled)
    example = as_pair(example, where)
    split = batch_rows(example, where, padding) if is_pair(example) else first_batch(example, settings, where, padding)
    if split.count < batch_size:
        raise DataError(
            f"the example has {split.count} rows, and a batch may have {batch_size}. Give --batch-size {split.count}, or an "
            "example with more."
        )
    return replace(first_rows(split, batch_size), labelled=not bare)


def rows_of_a_window(example: Split) -> Split:
    """Returns stand-in test rows for a session's plan: as many as are read at once from any larger number."""
    layout = RowLayout(example.shape, example.dtype)
    return replace(example, name="test", count=max(example.count, WINDOW * layout.chunk_rows))


def _refuse_labels_as_test(train: object, test: object) -> None:
    """Raises DataError for (x, y) in two arguments."""
    if isinstance(train, torch.Tensor | np.ndarray) and isinstance(test, torch.Tensor | np.ndarray):
        raise DataError(
            "expected the training rows, and perhaps test rows, each a pair; found tensors of shape "
            f"{tuple(train.shape)} and {tuple(test.shape)}. Give x and y as one argument: fit((x, y))."
        )
