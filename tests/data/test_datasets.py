"""Every way to name a data set, on tiny files made here; the real ones too where they lie beside the repository."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.data.classes import count_classes
from seqpart.data.splits import ROWS_AT_ONCE, as_split
from seqpart.errors import DataError, OptionError
from seqpart.zoo import datasets
from tests.given import idx

SHARED = Path(__file__).parents[3] / "shared" / "data"


def rows_of(split):
    split = as_split(split, "some")
    return torch.cat(list(split.open()))


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def images(count, seed=0, sides=(5, 4)):
    return np.random.default_rng(seed).integers(0, 256, (count, *sides), np.uint8)


def labels(count):
    return (np.arange(count) % 3).astype(np.uint8)


IDX_NAMES = {
    "MNIST": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    "with points": ("train-images.idx3-ubyte", "train-labels.idx1-ubyte", "t10k-images.idx3-ubyte", "t10k-labels.idx1-ubyte"),
    "zipped": tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")),
    "EMNIST": tuple(
        f"emnist-letters-{part}-{kind}-ubyte" for part in ("train", "test") for kind in ("images-idx3", "labels-idx1")
    ),
}


@pytest.mark.parametrize("names", IDX_NAMES.values(), ids=IDX_NAMES)
def test_idx_files_are_found_by_their_usual_names(names, tmp_path):
    count = ROWS_AT_ONCE + 3
    for name, data in zip(names, (images(count), labels(count), images(7, 1), labels(7)), strict=True):
        write(tmp_path / name, idx(data))
    (tmp_path / "mapping.txt").write_text("0 48")
    train, test = datasets.load(f"idx:{tmp_path}")
    assert (train.count, train.shape, test.count, test.shape) == (count, (1, 5, 4), 7, (1, 5, 4))
    torch.testing.assert_close(rows_of(train)[:, 0] * 255, torch.from_numpy(images(count)).float())
    torch.testing.assert_close(rows_of(test)[:, 0] * 255, torch.from_numpy(images(7, 1)).float())
    assert train.labels.tolist() == labels(count).tolist()
    assert test.labels.tolist() == labels(7).tolist()


def test_zipped_and_plain_copies_of_one_set_are_one_set(tmp_path):
    for name, data in zip(IDX_NAMES["MNIST"], (images(9), labels(9), images(7), labels(7)), strict=True):
        write(tmp_path / name, idx(data))
        write(tmp_path / f"{name}.gz", idx(data))
    train, _ = datasets.load(f"idx:{tmp_path}")
    assert train.count == 9


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_and_its_kin_are_read_where_torchvision_puts_them_without_importing_it(name, folder, tmp_path):
    for file, data in zip(IDX_NAMES["MNIST"], (images(9), labels(9), images(7), labels(7)), strict=True):
        write(tmp_path / folder / "raw" / file, idx(data))
    imported = "torchvision" in sys.modules
    train, _ = datasets.load(name, data_dir=tmp_path)
    assert (train.count, train.shape) == (9, (1, 5, 4))
    assert ("torchvision" in sys.modules) == imported


def test_mnist_as_read_here_is_mnist_as_torchvision_reads_it(tmp_path):
    from torchvision.datasets import MNIST

    for file, data in zip(IDX_NAMES["MNIST"], (images(9), labels(9), images(7), labels(7)), strict=True):
        write(tmp_path / "MNIST" / "raw" / file, idx(data))
    for split, train in zip(datasets.load("mnist", data_dir=tmp_path), (True, False), strict=True):
        theirs = MNIST(str(tmp_path), train=train)
        torch.testing.assert_close(rows_of(split)[:, 0] * 255, theirs.data.float())
        assert split.labels.tolist() == theirs.targets.tolist()


def test_emnist_takes_the_balanced_files_and_stands_the_images_up(tmp_path):
    for part, count in (("train", 9), ("test", 7)):
        for split in ("balanced", "digits"):
            stem = tmp_path / "EMNIST" / "raw" / f"emnist-{split}-{part}"
            write(stem.with_name(f"{stem.name}-images-idx3-ubyte"), idx(images(count, split == "digits")))
            write(stem.with_name(f"{stem.name}-labels-idx1-ubyte"), idx(labels(count)))
    train, _ = datasets.load("emnist", data_dir=tmp_path)
    assert train.shape == (1, 4, 5)
    torch.testing.assert_close(rows_of(train)[:, 0] * 255, torch.from_numpy(images(9)).float().transpose(1, 2))


def test_npz_with_four_arrays_is_a_training_and_a_test_set(tmp_path):
    x = np.random.default_rng(0).normal(size=(ROWS_AT_ONCE + 5, 6))
    y = np.arange(len(x)) % 4
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:7], y_test=y[:7])
    train, test = datasets.load(f"npz:{tmp_path / 'a.npz'}")
    torch.testing.assert_close(rows_of(train), torch.from_numpy(x).float())
    torch.testing.assert_close(rows_of(test), torch.from_numpy(x[:7]).float())
    assert train.labels.dtype == torch.int64
    assert train.labels.tolist() == y.tolist()


@pytest.mark.parametrize("names", [("x", "y"), ("images", "labels")])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_with_one_pair_gives_every_fifth_row_to_the_test_set(names, save, tmp_path):
    x, y = images(ROWS_AT_ONCE + 9), labels(ROWS_AT_ONCE + 9)
    save(tmp_path / "a.npz", **dict(zip(names, (x, y), strict=True)))
    train, test = datasets.load(f"npz:{tmp_path / 'a.npz'}")
    is_test = np.arange(len(x)) % 5 == 4
    torch.testing.assert_close(rows_of(train), torch.from_numpy(x[~is_test]).float() / 255)
    torch.testing.assert_close(rows_of(test), torch.from_numpy(x[is_test]).float() / 255)
    assert (train.labels.tolist(), test.labels.tolist()) == (y[~is_test].tolist(), y[is_test].tolist())


@pytest.mark.parametrize("given", ["train.npz", "."], ids=["the file", "its directory"])
def test_train_npz_goes_with_the_test_npz_beside_it(given, tmp_path):
    np.savez(tmp_path / "train.npz", images=images(9), labels=labels(9))
    np.savez(tmp_path / "test.npz", images=images(7, 1), labels=labels(7)[:, None])
    train, test = datasets.load(f"npz:{tmp_path / given}")
    assert (train.count, test.count) == (9, 7)
    torch.testing.assert_close(rows_of(test) * 255, torch.from_numpy(images(7, 1)).float())


def test_npz_arrays_in_any_order_of_bytes_and_of_memory_give_the_same_rows(tmp_path):
    x = np.random.default_rng(0).normal(size=(300, 3, 2))
    for name, array in {"c": x, "fortran": np.asfortranarray(x), "big": x.astype(">f4"), "half": x.astype(np.float16)}.items():
        np.savez(tmp_path / f"{name}.npz", x_train=array, y_train=np.arange(300) % 2, x_test=x[:5], y_test=np.arange(5) % 2)
        train, _ = datasets.load(f"npz:{tmp_path / f'{name}.npz'}")
        # float16 keeps 11 bits: the others agree to float32's own rounding.
        torch.testing.assert_close(
            rows_of(train), torch.from_numpy(x).float(), rtol=1e-3 if name == "half" else 0, atol=1e-3 if name == "half" else 0
        )


def test_npz_with_float_labels_is_a_regression(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((10, 3)), y=np.linspace(0, 1, 10))
    train, test = datasets.load(f"npz:{tmp_path / 'a.npz'}")
    assert train.labels.dtype == torch.float32
    assert count_classes(train, test) == 0


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((0, 3)), "y": np.zeros(0, np.int64)}, "training data: the set is empty"),
        ({"x": np.zeros((9, 3)), "y": np.full(9, 2**63 + 5, np.uint64)}, r"count from 0; found one of 2\*\*63 or more"),
        ({"x": np.full((9, 3), 1e300), "y": np.arange(9) % 2}, r"NaN or infinity \(as a 32-bit float\) in row 0"),
    ],
)
def test_an_npz_file_that_teaches_nothing_is_named_with_the_reason(arrays, words, tmp_path):
    """Blamed before: the labels that a loss leaves out, a negative class, and a line of numpy's as well."""
    np.savez(tmp_path / "a.npz", **arrays)
    trainer = Trainer([nn.Linear(3, 2)], mem_limit="2GB", method="full", output_dir=tmp_path / "run")
    with pytest.raises(DataError, match=words):
        trainer.fit(*datasets.load(f"npz:{tmp_path / 'a.npz'}"))


def test_a_file_without_its_kind_is_refused_with_what_may_be_meant(tmp_path):
    with pytest.raises(OptionError, match=r"found 'rows\.npz'\. Did you mean npz:rows\.npz\?"):
        datasets.load("rows.npz")


def test_a_pass_over_an_npz_file_does_not_hold_it_whole(tmp_path):
    import tracemalloc

    np.savez(tmp_path / "a.npz", x=np.zeros((4096, 2048), np.float32), y=np.arange(4096) % 2)
    train, _ = datasets.load(f"npz:{tmp_path / 'a.npz'}")
    tracemalloc.start()  # numpy reports its arrays to it
    try:
        assert sum(len(rows) for rows in train.open()) == train.count
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def write_images(folder, classes, count, size=6):
    from PIL import Image

    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (size, size + 2), (40 * number, 0, i)).save(folder / name / f"{i}.png")


def test_a_folder_with_train_and_test_keeps_them_apart(tmp_path):
    write_images(tmp_path / "train", ["cat", "dog"], 4)
    write_images(tmp_path / "test", ["cat", "dog"], 2)
    train, test = (as_split(part, "some") for part in datasets.load(f"folder:{tmp_path}"))
    assert (train.count, test.count, train.shape) == (8, 4, (3, 8, 6))
    assert train.labels.tolist() == [0] * 4 + [1] * 4
    torch.testing.assert_close(rows_of(test)[:, 0, 0, 0], torch.tensor([0, 0, 40, 40]) / 255)


def test_a_folder_of_classes_gives_every_fifth_image_to_the_test_set(tmp_path):
    write_images(tmp_path, ["cat", "dog"], 5)
    train, test = (as_split(part, "some") for part in datasets.load(f"folder:{tmp_path}"))
    assert train.labels.tolist() == [0] * 4 + [1] * 4
    assert test.labels.tolist() == [0, 1]
    assert rows_of(test)[:, 2, 0, 0].mul(255).round().tolist() == [4, 4]


def test_image_size_resizes_the_images_of_a_folder(tmp_path):
    write_images(tmp_path, ["cat", "dog"], 5)
    train, _ = datasets.load(f"folder:{tmp_path}", image_size=3)
    assert rows_of(train).shape == (8, 3, 3, 3)


def test_images_of_different_sizes_are_refused_with_the_option_that_helps(tmp_path):
    write_images(tmp_path, ["cat"], 5)
    write_images(tmp_path / "more", ["dog"], 5, size=9)
    (tmp_path / "more" / "dog").rename(tmp_path / "dog")
    (tmp_path / "more").rmdir()
    train, _ = datasets.load(f"folder:{tmp_path}")
    with pytest.raises(DataError, match=r"row shapes differ: .* in row 4.*image_size"):
        rows_of(train)


def test_a_damaged_image_is_named(tmp_path):
    write_images(tmp_path, ["cat", "dog"], 5)
    (tmp_path / "cat" / "2.png").write_bytes(b"not an image")
    train, _ = datasets.load(f"folder:{tmp_path}")
    with pytest.raises(DataError, match=r"item 2 \(.*2\.png\) cannot be read"):
        rows_of(train)


def test_a_function_of_the_user_gives_data_of_any_kind(tmp_path, monkeypatch):
    (tmp_path / "given_data.py").write_text(
        "import numpy as np, torch\nfrom torch.utils.data import TensorDataset\n\n"
        "x, y = np.zeros((4, 2)), np.array([0, 1, 0, 1])\n"
        "def sets(): return (x, y), TensorDataset(torch.zeros(2, 2), torch.tensor([0, 1]))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    train, test = (as_split(part, "some") for part in datasets.load("given_data:sets"))
    assert (train.count, test.count, train.shape, test.shape) == (4, 2, (2,), (2,))


def test_the_digits_are_split_as_they_always_were():
    train, test = datasets.load("digits")
    assert (train.count, test.count, train.shape) == (1438, 359, (64,))
    assert train.labels[:5].tolist() == [0, 1, 2, 3, 5]
    assert test.labels[:5].tolist() == [4, 9, 4, 9, 4]
    x = rows_of(train)
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    assert count_classes(train, test) == 10


def test_the_digits_are_scikit_learn_s():
    from sklearn.datasets import load_digits

    theirs = load_digits()
    train, _ = datasets.load("digits")
    torch.testing.assert_close(rows_of(train) * 16, torch.from_numpy(theirs.data[np.arange(1797) % 5 != 4]).float())


def test_every_pass_over_a_set_gives_the_same_rows(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=(20, 3)), y=np.arange(20) % 2)
    for name in ("digits", f"npz:{tmp_path / 'a.npz'}"):
        train, _ = datasets.load(name)
        assert torch.equal(rows_of(train), rows_of(train))


@pytest.mark.parametrize("name", ["", "mnists", "idx", "npz:", "folder:", ":f"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(OptionError, match=r"expected.*package\.module:function"):
        datasets.load(name)


REAL = {
    "mnist": ({"data_dir": SHARED}, 60000, 10000, (1, 28, 28), 10),
    f"idx:{SHARED / 'EMNIST47' / 'raw'}": ({}, 93785, 15620, (1, 28, 28), 47),
    f"npz:{SHARED / 'cifar10-subset' / 'train.npz'}": ({}, 20000, 4000, (3, 32, 32), 10),
}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets are not beside this repository")
@pytest.mark.parametrize("name", REAL, ids=["MNIST", "EMNIST47", "CIFAR-10 subset"])
def test_real_data_sets_have_their_rows_and_classes(name):
    options, train_rows, test_rows, shape, classes = REAL[name]
    train, test = datasets.load(name, **options)
    assert (train.count, test.count, train.shape, test.shape) == (train_rows, test_rows, shape, shape)
    assert count_classes(train, test) == classes
    first = next(iter(test.open()))
    assert first.shape == (ROWS_AT_ONCE, *shape)
    assert 0.05 < float(first.mean()) < 0.6
    assert float(first.max()) <= 1.0


def test_a_zipped_file_with_a_flipped_bit_is_named(tmp_path):
    """gzip raises zlib.error, which is no OSError: a damaged .gz ended in a traceback."""
    for kind in ("images-idx3", "labels-idx1"):
        whole = bytearray(gzip.compress(bytes(range(10)) * 500))
        whole[11] ^= 255
        (tmp_path / f"train-{kind}-ubyte.gz").write_bytes(whole)
    with pytest.raises(DataError, match=r"ubyte\.gz is damaged: .* Fetch it again"):
        datasets.load(f"idx:{tmp_path}")
