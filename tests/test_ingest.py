"""Data as it comes from the user: what is taken, what is refused, and how it is streamed."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from seqpart.errors import DataError
from seqpart.ingest import ROWS_AT_ONCE, Split, as_split, count_classes, pour, refuse_mismatch

X, Y = torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])


class Items(Dataset):
    """Map-style, with whatever `targets` a test wants."""

    def __init__(self, pairs, **attributes):
        self.pairs = pairs
        vars(self).update(attributes)

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


def split_of(labels, name="training"):
    labels = torch.as_tensor(labels)
    return as_split((torch.zeros(len(labels), 2), labels), name)


def poured(split):
    rows = []
    pour(split, rows.append)
    return torch.cat(rows)


GIVEN = {
    "tensors": (X, Y),
    "arrays": (X.numpy(), Y.numpy()),
    "whole numbers": (X.to(torch.int32), Y.to(torch.uint8)),
    "a list of both": [X, Y],
    "TensorDataset": TensorDataset(X, Y),
    "Subset": Subset(TensorDataset(torch.cat([X, X]), torch.cat([Y, Y])), range(6)),
    "items with numbers": Items([(x.numpy(), int(y)) for x, y in zip(X, Y, strict=True)]),
    "targets": Items([(x, None) for x in X], targets=Y.tolist()),
}


@pytest.mark.parametrize("data", GIVEN.values(), ids=GIVEN)
def test_pairs_and_map_style_sets_become_the_same_rows_and_labels(data):
    split = as_split(data, "training")
    assert (split.count, split.shape) == (6, (2,))
    assert split.labels.dtype == torch.int64
    assert torch.equal(split.labels, Y)
    assert torch.equal(poured(split), X)


def test_a_split_stays_what_it_is():
    split = split_of(Y)
    assert as_split(split, "training") is split


def test_a_memory_mapped_array_is_taken_without_a_warning(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    split = as_split((np.load(tmp_path / "x.npy", mmap_mode="r"), Y.numpy()), "training")
    assert torch.equal(poured(split), X)


def test_rows_are_streamed_a_chunk_at_a_time():
    x = torch.arange(2.0 * ROWS_AT_ONCE + 1)[:, None]
    sizes = []
    pour(as_split((x, torch.arange(len(x)) % 2), "training"), lambda rows: sizes.append(len(rows)))
    assert sizes == [ROWS_AT_ONCE, ROWS_AT_ONCE, 1]


def test_labels_belong_to_us():
    y = Y.clone()
    split = as_split((X, y), "training")
    y += 1
    assert torch.equal(split.labels, Y)


def test_float_labels_are_a_regression():
    split = as_split((X, Y.double() / 2), "training")
    assert split.labels.dtype == torch.float32
    assert count_classes(split, split) == 0


REFUSED = {
    "expected a pair": 7,
    "the set is empty": (X[:0], Y[:0]),
    "the set is empty. Give": [],
    "6 rows of x and 5 labels": (X, Y[:5]),
    "no rows of x": (torch.tensor(1.0), Y),
    r"labels: expected shape \(rows,\), found \(6, 3\)": (X, torch.eye(6)[:, :3]),
    "labels: NaN or infinity in row 2": (X, torch.tensor([0, 1, float("nan"), 0, 1, 2])),
    "labels: expected one number for each row": Items([(x, name) for x, name in zip(X, "abcdef", strict=True)]),
    "labels: expected whole numbers": (X, Y.to(torch.complex64)),
    "expected x to be numbers; found an array of type <U1": (np.array(list("abcdef"))[:, None], Y),
    "expected x to be numbers; found an array of type object": (np.array([[None]] * 6), Y),
    r"rows of shape \(0,\) hold no numbers": (X[:, :0], Y),
    r"expected item 0 to be a pair \(tensor, label\)": Items([1, 2, 3]),
    "item 0 cannot be read: KeyError: 0": Items({"a": (X[0], 0)}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_unusable_data_is_refused_in_words(words):
    with pytest.raises(DataError, match=f"training .*{words}|training {words}"):
        as_split(REFUSED[words], "training")


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        ([0, -1], [0], "found class -1; expected classes that count from 0"),
        ([4, 4], [4], "every row has class 4. Training needs at least two classes"),
        ([0, 1], [2], "test labels: class 2 does not occur in the training rows. Add training rows"),
        ([0, 1], [-1], "test labels: class -1 does not occur"),
        ([0, 5000], [0], "found class 5000 among 2 classes; number them 0 to 1"),
        ([0, 1], [0.5], "labels differ: training has torch.int64 and test torch.float32"),
    ],
)
def test_labels_that_cannot_be_classes_are_refused(train, test, words):
    with pytest.raises(DataError, match=words):
        count_classes(split_of(train), split_of(test, "test"))


def test_gaps_in_the_numbers_of_a_few_classes_are_allowed():
    assert count_classes(split_of([1, 999]), split_of([1])) == 1000


def test_rows_of_different_shapes_in_training_and_test_are_refused():
    test = as_split((torch.zeros(2, 3), torch.tensor([0, 1])), "test")
    with pytest.raises(DataError, match=r"training rows have shape \(2,\) and test rows \(3,\)"):
        refuse_mismatch(split_of(Y), test)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_row_that_is_not_finite_as_it_is_trained_on_is_named(value):
    x = torch.zeros(ROWS_AT_ONCE + 50, 2, dtype=torch.float64)
    x[ROWS_AT_ONCE + 7, 1] = value
    with pytest.raises(DataError, match=f"NaN or infinity .* in row {ROWS_AT_ONCE + 7}. Clean the data"):
        poured(as_split((x, torch.arange(len(x)) % 2), "training"))


def test_complex_rows_are_refused():
    with pytest.raises(DataError, match=r"expected real numbers; found torch\.complex64"):
        poured(as_split((X.to(torch.complex64), Y), "training"))


def test_an_item_of_another_shape_is_named():
    items = Items([(torch.zeros(2), 0), (torch.zeros(3), 1)])
    with pytest.raises(DataError, match=r"row shapes differ: \(2,\) in row 0 and \(3,\)"):
        poured(as_split(items, "training"))


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([torch.zeros(2, 2)], "expected 3 rows, as len.. says; found 2"),
        ([torch.zeros(3, 2), torch.zeros(1, 2)], "expected 3 rows, as len.. says; found 4"),
        ([torch.zeros(1, 2), torch.zeros(2, 5)], r"expected rows of shape \(2,\); found \(5,\) from row 1 on"),
    ],
)
def test_a_split_that_does_not_keep_its_word_is_refused(chunks, words):
    split = Split(name="training", count=3, shape=(2,), labels=torch.tensor([0, 1, 0]), open=lambda: chunks)
    with pytest.raises(DataError, match=words):
        poured(split)
