"""Data as it comes from the user: what is taken, what is refused, and how it is streamed."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from seqpart import Trainer
from seqpart.config import Config
from seqpart.data.classes import count_classes
from seqpart.data.loaders import training_rows
from seqpart.data.row_types import in_type_of
from seqpart.data.splits import ROWS_AT_ONCE, Split, as_split, count_tokens, refuse_mismatch, write_rows
from seqpart.errors import DataError, ModelError

FLOAT32 = nn.Linear(1, 1)
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


@pytest.mark.parametrize(("length", "said"), [(-3, "ValueError"), (2.5, "TypeError"), (None, "TypeError")])
def test_a_data_set_that_does_not_know_its_length_is_refused_in_words(length, said):
    """It ended in a traceback out of len()."""

    class Unsure(Items):
        def __len__(self):
            return length

    with pytest.raises(DataError, match=rf"training data: len\(\) of the Unsure failed: {said}.*number of its rows"):
        as_split(Unsure([(X[0], 1)]), "training")


def written_rows(split):
    rows = []
    write_rows(split, rows.append)
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
    assert torch.equal(written_rows(split), X)


def test_a_split_stays_what_it_is():
    split = split_of(Y)
    assert as_split(split, "training") is split


def test_a_memory_mapped_array_is_taken_without_a_warning(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    split = as_split((np.load(tmp_path / "x.npy", mmap_mode="r"), Y.numpy()), "training")
    assert torch.equal(written_rows(split), X)


def test_rows_are_streamed_a_chunk_at_a_time():
    x = torch.arange(2.0 * ROWS_AT_ONCE + 1)[:, None]
    sizes = []
    write_rows(as_split((x, torch.arange(len(x)) % 2), "training"), lambda rows: sizes.append(len(rows)))
    assert sizes == [ROWS_AT_ONCE, ROWS_AT_ONCE, 1]


def test_labels_belong_to_us():
    y = Y.clone()
    split = as_split((X, y), "training")
    y += 1
    assert torch.equal(split.labels, Y)


def test_float_labels_are_a_regression():
    split = in_type_of(FLOAT32, as_split((X, Y.double() / 2), "training"))
    assert split.labels.dtype == torch.float32
    assert count_classes(split, split) == 0


REFUSED = {
    "expected a pair": 7,
    "the set is empty": (X[:0], Y[:0]),
    "the set is empty. Give": [],
    "6 rows of x and 5 labels": (X, Y[:5]),
    "no rows of x": (torch.tensor(1.0), Y),
    r"labels: expected shape \(rows,\), .* found \(6, 0\)": (X, torch.zeros(6, 0, dtype=torch.int64)),
    r"labels: expected shape \(rows,\), .* found \(\)": (X, torch.tensor(3)),
    "labels: NaN or infinity in row 2": (X, torch.tensor([0, 1, float("nan"), 0, 1, 2])),
    "labels: expected numbers of one shape for each row": Items([(x, name) for x, name in zip(X, "abcdef", strict=True)]),
    "labels: expected whole numbers": (X, Y.to(torch.complex64)),
    "expected x to be numbers; found an array of type <U1": (np.array(list("abcdef"))[:, None], Y),
    "expected x to be numbers; found an array of type object": (np.array([[None]] * 6), Y),
    r"rows of shape \(0,\) hold no numbers": (X[:, :0], Y),
    r"item 0: expected a pair \(x, label\), .*or a dict with labels; found a int": Items([1, 2, 3]),
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
        ([[0, 1]], [0], r"labels differ: training has shape \(1, 2\) and test \(1,\); give both one label per row"),
        ([[0, 1]], [[0, 1, 2]], r"labels differ: training has shape \(1, 2\) and test \(1, 3\)"),
        ([[0, -1]], [[0, 1]], "training labels: found class -1; expected classes that count from 0"),
        ([[0, 1]], [[0, -1]], "test labels: found class -1; expected classes that count from 0"),
        ([[4, 4]], [[4, 0]], "every row has class 4. Training needs at least two classes"),
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
        written_rows(in_type_of(FLOAT32, as_split((x, torch.arange(len(x)) % 2), "training")))


def test_a_complex_row_among_real_ones_is_refused():
    items = Items([(X[0], 0), (X[1].to(torch.complex64), 1)])
    with pytest.raises(DataError, match=r"expected real numbers; found torch\.complex64"):
        written_rows(as_split(items, "training"))


def test_an_item_of_another_shape_is_named():
    items = Items([(torch.zeros(2), 0), (torch.zeros(3), 1)])
    with pytest.raises(DataError, match=r"shapes differ: \(2,\) in row 0 and \(3,\) .* one shape\. Rows of several lengths"):
        written_rows(as_split(items, "training"))


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
        written_rows(split)


# --- Tokens, float64, and labels of positions ------------------------------------------------------------------------

TOKENS = torch.arange(12).view(6, 2)


def split_as(rows, dtype):
    return Split(name="training", count=len(rows), shape=rows.shape[1:], labels=Y, open=lambda: [rows], dtype=dtype)


@pytest.mark.parametrize(
    "data",
    [(TOKENS, Y), (TOKENS.numpy(), Y.numpy()), TensorDataset(TOKENS, Y), Items([(x.numpy(), 0) for x in TOKENS])],
    ids=["tensors", "arrays", "TensorDataset", "items"],
)
def test_whole_numbers_of_64_bits_are_tokens_and_stay_whole(data):
    split = as_split(data, "training")
    assert split.tokens
    assert written_rows(split).dtype == torch.int64
    assert torch.equal(written_rows(split), TOKENS)
    assert count_tokens(split, split) == 12


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.int16, np.uint16, np.float16, np.float32, np.float64])
def test_numbers_of_any_other_type_become_float32(kind):
    x = (X.numpy() % 2).astype(kind)
    for data in ((x, Y.numpy()), Items([(row, 0) for row in x])):
        split = in_type_of(FLOAT32, as_split(data, "training"))
        assert (split.dtype, split.tokens) == (torch.float32, False)
        assert torch.equal(written_rows(split), X % 2)


@pytest.mark.parametrize("wide", [torch.float64, torch.float32])
def test_rows_have_the_type_of_what_factories_make(wide):
    """Factories were not asked: rows of float64 became float32, and the model of float64 refused them."""
    rows = as_split((torch.randn(6, 1, dtype=torch.float64), torch.arange(6) % 2), "training")
    assert in_type_of([lambda: nn.Linear(1, 1, dtype=wide), nn.ReLU], rows).dtype == wide


def test_a_list_of_numbers_has_no_type_and_becomes_float32():
    assert written_rows(as_split(Items([([1, 2], 0), ([3, 4], 1)]), "training")).dtype == torch.float32


@pytest.mark.parametrize("asked", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_a_split_of_any_type_of_whole_numbers_is_tokens_of_64_bits(asked):
    split = as_split(split_as(TOKENS.to(torch.uint8), asked), "training")
    assert split.dtype == written_rows(split).dtype == torch.int64
    assert torch.equal(written_rows(split), TOKENS)


def test_a_split_keeps_float64_where_it_says_so():
    rows = torch.randn(6, 2, dtype=torch.float64)
    assert torch.equal(written_rows(as_split(split_as(rows, torch.float64), "training")), rows)
    large = torch.full((6, 2), 1e300, dtype=torch.float64)
    assert torch.equal(written_rows(as_split(split_as(large, torch.float64), "training")), large)
    with pytest.raises(DataError, match=r"NaN or infinity \(as a 64-bit float\) in row 0"):
        written_rows(as_split(split_as(large * 1e300, torch.float64), "training"))


@pytest.mark.parametrize("asked", [torch.bool, torch.float8_e5m2])
def test_a_split_of_rows_that_no_model_takes_is_refused(asked):
    with pytest.raises(DataError, match=f"training data: expected rows of float32, .* or int64 .* found dtype={asked}"):
        as_split(split_as(TOKENS, asked), "training")


def test_a_token_below_0_is_named_with_the_cure_for_quantities():
    rows = torch.zeros(ROWS_AT_ONCE + 50, 2, dtype=torch.int64)
    rows[ROWS_AT_ONCE + 7, 1] = -3
    with pytest.raises(DataError, match=f"found token -3 in row {ROWS_AT_ONCE + 7}; .* give quantities as floats"):
        written_rows(as_split((rows, torch.arange(len(rows)) % 2), "training"))


def test_floats_are_no_tokens():
    with pytest.raises(DataError, match=r"training data: expected tokens \(whole numbers\); found torch\.float32"):
        written_rows(split_as(X, torch.int64))


def test_tokens_in_training_and_floats_in_test_are_refused():
    with pytest.raises(DataError, match=r"training rows are torch\.int64 and test rows torch\.float32; give both as one type"):
        refuse_mismatch(as_split((TOKENS, Y), "training"), as_split((X, Y), "test"))


NARROW = {
    torch.bool: torch.uint8, torch.uint8: torch.uint8, torch.int8: torch.int8, torch.int16: torch.int16,
    torch.uint16: torch.int32, torch.int32: torch.int32, torch.int64: torch.int64,
}  # fmt: skip


@pytest.mark.parametrize("kind", NARROW, ids=str)
def test_labels_of_positions_keep_their_shape_and_as_narrow_a_type_as_torch_computes_with(kind):
    labels = (torch.arange(6 * 4) % 2).view(6, 2, 2)
    for data in ((X, labels.to(kind)), (X.numpy(), labels.to(kind).numpy()), TensorDataset(X, labels.to(kind))):
        split = as_split(data, "training")
        assert split.labels.dtype == NARROW[kind]
        assert torch.equal(split.labels.to(torch.int64), labels)
        assert count_classes(split, split) == 2


def test_labels_of_rows_are_64_bits_wide_whatever_was_given():
    assert {as_split((X, Y.to(kind)), "training").labels.dtype for kind in NARROW if kind != torch.bool} == {torch.int64}


def test_labels_of_positions_may_leave_gaps_and_occur_in_the_test_alone():
    assert count_classes(split_of([[0, 50000]]), split_of([[7, 8]])) == 50001
    assert count_classes(split_of([[0, 1]]), split_of([[7, 8]])) == 9


def test_labels_of_different_numbers_of_positions_are_refused():
    items = Items([(X[0], torch.zeros(2, dtype=torch.int64)), (X[1], torch.zeros(3, dtype=torch.int64))])
    with pytest.raises(DataError, match="training labels: expected numbers of one shape for each row"):
        as_split(items, "training")


class Augmented(Items):
    """Rows that are flipped at random, or have noise, as torchvision's transforms make them."""

    def __init__(self, pairs, change):
        super().__init__(pairs)
        self.change = change

    def __getitem__(self, index):
        x, y = self.pairs[index]
        return self.change(x, y)


RANDOM = {
    "noise": lambda x, y: (x + torch.randn_like(x), y),
    "a flip now and then": lambda x, y: (x.flip(0) if torch.rand(()) < 0.3 else x, y),
    "a change so rare that no item had it": lambda x, y: (x.flip(0) if random.random() < 1e-9 else x, y),
    "numpy's numbers": lambda x, y: (x + np.random.default_rng().normal(), y),
    "python's numbers": lambda x, y: (x * random.random(), y),
    "labels": lambda x, y: (x, int(torch.randint(3, ()))),
}


@pytest.mark.parametrize("change", RANDOM.values(), ids=RANDOM)
def test_items_that_are_others_when_they_are_read_again_are_refused_with_the_way_on(change):
    """Augmentation was frozen at its first draw, in every epoch the same, and nobody said so."""
    items = Augmented([(torch.arange(4.0) + i, i % 3) for i in range(40)], change)
    with pytest.raises(DataError, match=r"item \d+ is another one when it is read again.*first block.*keep one draw"):
        as_split(items, "training")
    assert as_split([items[i] for i in range(len(items))], "training").count == 40  # on purpose


def test_items_that_are_random_by_their_number_are_no_augmentation():
    def seeded(x, y):
        return x + torch.randn(4, generator=torch.Generator().manual_seed(y)), y

    assert as_split(Augmented([(torch.zeros(4), i % 3) for i in range(9)], seeded), "training").count == 9


def test_labels_are_those_of_the_items_where_targets_says_otherwise():
    """A wrapper that changes labels and hands on the `targets` of what it wraps trained on labels that no item has."""
    items = Items([(x, 1 - int(y) % 2) for x, y in zip(X, Y, strict=True)], targets=Y.tolist())
    assert as_split(items, "training").labels.tolist() == [1, 0, 1, 1, 0, 1]


def test_a_label_among_many_that_differs_from_targets_is_refused_as_its_row_is_read():
    """32 items agreed with `targets`, and the 2 % that their data set had relabelled trained on the labels from before."""
    items = Items([(torch.zeros(1), int(i == 44)) for i in range(300)], targets=[0] * 300)
    with pytest.raises(DataError, match=r"item 44 has the label 1, and .*`targets` has 0. .*cache=.none"):
        list(as_split(items, "training").open())


class OneDrawn(Items):
    """One of 300 items is drawn at random."""

    def __getitem__(self, index):
        return torch.rand(1) if index == 44 else torch.zeros(1), 0


def test_one_item_that_is_drawn_at_random_is_no_constant_row():
    """A minority class alone was augmented: none of 32 items showed it, and every epoch saw the same draw."""
    items, believed = OneDrawn(range(300)), OneDrawn(range(300), targets=[0] * 300)
    auto, none, rows = (Config(mem_limit=1, cache=cache) for cache in ("auto", "none", "rows"))
    assert training_rows(items, auto).source is not None  # the pass over its labels shows it
    with pytest.raises(DataError, match=r"items 0\.\.255 draw random numbers.*cache=.none"):
        list(training_rows(believed, auto).open())
    assert training_rows(believed, none).source is not None
    for kept in (training_rows(believed, rows), as_split(believed, "test")):
        assert len(torch.cat(list(kept.open()))) == 300


def test_a_data_loader_is_refused_with_what_to_give_instead():
    loader = DataLoader(TensorDataset(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(DataError, match=r"Give its data set \(loader.dataset\)"):
        as_split(loader, "training")


def test_labels_that_a_target_transform_changes_are_taken_from_the_items():
    """`targets` was believed although the data set transforms them: the network learned the untransformed classes."""

    class Even(torch.utils.data.Dataset):
        targets = (3, 4)

        def target_transform(self, label):
            return label % 2

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.zeros(1), self.target_transform(self.targets[index])

    assert as_split(Even(), "training").labels.tolist() == [1, 0]


def test_a_float64_that_float32_cannot_hold_is_not_finite():
    """Rows were checked before they became float32: 1e300 passed, was stored as infinity, and the loss was NaN."""
    split = in_type_of(FLOAT32, as_split((torch.full((2, 1), 1e300, dtype=torch.float64), torch.tensor([0, 1])), "training"))
    with pytest.raises(DataError, match="in row 0"):
        write_rows(split, lambda rows: None)


def test_a_label_in_the_millions_is_refused_before_anything_is_sized_by_it():
    """Two classes numbered 0 and 1,000,000 made a million outputs, and gigabytes of fixed targets outside the plan."""
    split = as_split((torch.zeros(2, 1), torch.tensor([0, 1_000_000])), "training")
    with pytest.raises(DataError, match="number them 0 to 1"):
        count_classes(split, split)


@pytest.mark.parametrize("kind", [torch.int32, torch.uint32, torch.int64, "int32", "uint32", "uint64", "int64"])
def test_whole_numbers_that_a_float_would_round_stay_whole(kind):
    """Hashed ids of 32 bits became others in silence, and all that was learned from them; in a dict they stayed whole."""
    numbers = np.array([[3, 1 << 24], [2, (1 << 24) + 1], [1, (1 << 31) - 1]])
    x = torch.as_tensor(numbers).to(kind) if isinstance(kind, torch.dtype) else numbers.astype(kind)
    found = []
    write_rows(as_split((x, torch.arange(3)), "training"), found.append)
    assert torch.cat(found).dtype == torch.int64 and torch.cat(found).tolist() == numbers.tolist()


def test_whole_numbers_beyond_63_bits_are_refused():
    x = np.array([[1, 1 << 63]] * 2, dtype=np.uint64)
    with pytest.raises(DataError, match=r"9223372036854775808.* is beyond 63 bits"):
        write_rows(as_split((x, torch.arange(2)), "training"), [].append)


def test_tokens_of_fewer_bits_are_told_to_be_given_as_64():
    """A traced model was told to let its embedding be "a module of its own"."""

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.end = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.end(self.words(x).mean(1))

    x = torch.randint(0, 9, (8, 3), dtype=torch.int16)
    with pytest.raises(ModelError, match=r"An embedding takes tokens: .*x\.long\(\)"):
        Trainer(Words(), mem_limit="2GB", method="full", quiet=True).plan((x, torch.arange(8) % 2))
    Trainer(Words(), mem_limit="2GB", method="full", quiet=True).plan((x.long(), torch.arange(8) % 2))


@pytest.mark.parametrize(
    "change", [lambda a: a.astype(a.dtype.newbyteorder(">")), lambda a: a[::-1].copy()[::-1], np.asfortranarray]
)
@pytest.mark.parametrize("give", [lambda x: x, lambda x: {"x": x}], ids=["a pair", "a dict"])
def test_arrays_of_any_byte_order_and_any_strides_are_the_rows_that_they_hold(change, give):
    """torch's own error said that byte orders are not supported, as of a file of FITS or the first MNIST."""
    x, y = np.arange(24, dtype=np.float32).reshape(6, 4), np.arange(6) % 3
    one, other = as_split((give(x), y), "train"), as_split((give(change(x)), change(y)), "train")
    assert torch.equal(torch.cat([*one.open()]), torch.cat([*other.open()]))
    assert torch.equal(one.labels, other.labels)
