"""Counts the classes of the labels of training and test rows."""

import torch

from seqpart.capture.inputs import described
from seqpart.data.splits import Split
from seqpart.errors import DataError
from seqpart.model.losses import IGNORED

SPARSE_CLASSES = 1000
"""Up to this many classes, gaps in their numbers cost little."""


def count_classes(
    train: Split, test: Split, ignored: int | None = IGNORED, *, learns: bool = True, contrasts: bool = False
) -> int:  # fmt: skip
    """Returns the number of classes of integer labels, from 0 up; 0 for labels to regress, and for several labels in a row.

    Raises DataError for a negative label, a single class, numbers far beyond the classes that occur, a test label that
    training never saw, and test labels of another kind. Labels of positions may be any of a vocabulary, of which a text
    rarely has every entry: gaps, and labels that only the test rows have, are classes like the others.

    ignored: the label that the loss leaves out, which is no class; None: the loss is the user's own, and defines what labels
        below 0 mean.
    learns: true if the rows are trained on; otherwise a single class is accepted, with any number.
    contrasts: true if a single class may be meant: a user's loss of logits whose first one is right (MoCo).
    """
    test = test if test.count else train  # every label has been seen then
    if train.label_form != test.label_form:
        raise DataError(
            f"labels differ: training rows have {described(train.label_form)}, and test rows {described(test.label_form)}."
        )
    if train.label_form:
        return 0
    if are_mixed(train, test):
        (least, most), classes = _class_range(test, ignored), train.labels.shape[1]
        if not 0 <= least <= most < classes:
            raise DataError(
                f"{test.name} labels: found class {least if least < 0 else most}; training rows have the probabilities of "
                f"{classes} classes, which count from 0."
            )
        return 0
    if train.labels.shape[1:] != test.labels.shape[1:]:
        raise DataError(
            f"labels differ: training has shape {tuple(train.labels.shape)} and test {tuple(test.labels.shape)}; "
            "give both one label per row, or one for each of equally many positions."
        )
    if train.labels.is_floating_point() != test.labels.is_floating_point():
        raise DataError(
            f"labels differ: training has {train.labels.dtype} and test {test.labels.dtype}; give both as one type."
        )
    if train.labels.is_floating_point():
        return 0
    (least, most), (least_tested, most_tested) = (_class_range(split, ignored, learns=learns) for split in (train, test))
    for split, found in (train, least), (test, least_tested if train.labels.ndim > 1 else 0):
        if found < 0:
            raise DataError(f"{split.name} labels: found class {found}; expected classes that count from 0.")
    if not learns or not train.has_all_labels:  # only the first rows of an uncounted stream are known
        return 1 + max(most, most_tested)
    if least == most and not contrasts:
        raise DataError(f"{train.name} labels: every row has class {least}. Training needs at least two classes.")
    if train.labels.ndim > 1:
        return 1 + max(most, most_tested)
    return _class_count(train, test, ignored)


def are_mixed(train: Split, test: Split) -> bool:
    """True if training rows have probabilities of classes (MixUp), (rows, classes, ...), and test rows have classes."""
    return (
        train.labels.is_floating_point() and not test.labels.is_floating_point() and not test.label_form
        and train.labels.ndim == test.labels.ndim + 1 and train.labels.shape[2:] == test.labels.shape[1:]
    )  # fmt: skip


def _class_range(split: Split, ignored: int | None, *, learns: bool = True) -> tuple[int, int]:
    """Returns the least and the largest class, found piece by piece: a mask of all labels might not fit in memory."""
    found: list[int] = []
    for piece in torch.split(split.labels.flatten(), 1 << 20):
        counted = counts_as_class(piece, ignored)
        if len(counted):
            found += (int(n) for n in counted.aminmax())
    if not split.count:
        raise DataError(f"{split.name} data: the set is empty. Give at least one row.")
    if not found and (ignored is None or not learns):
        return 0, 0
    if not found:
        raise DataError(f"{split.name} labels: every label is one that the loss leaves out. Give rows to learn from.")
    return min(found), max(found)


def counts_as_class(labels: torch.Tensor, ignored: int | None) -> torch.Tensor:
    """Returns those of `labels` (n,) that the loss does not leave out: see `count_classes`."""
    if ignored is None:
        return labels[labels >= 0]
    return labels if ignored < 0 and not labels.dtype.is_signed else labels[labels != ignored]


def _class_count(train: Split, test: Split, ignored: int | None) -> int:
    """Counts the classes of labels of whole rows. Raises DataError for classes without training rows, and for large gaps."""
    seen, tested = (torch.unique(counts_as_class(split.labels, ignored)) for split in (train, test))
    unknown = tested[~torch.isin(tested, seen)]
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
