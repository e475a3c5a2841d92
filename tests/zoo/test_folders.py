"""`--data folder:DIR`: which directories are splits, which are classes, and which only look like one of them."""

import numpy as np
import pytest
import torch
from PIL import Image

from seqpart.data.splits import as_split
from seqpart.errors import DataError
from seqpart.zoo import datasets
from tests.command import call, refused

CLASSES = ("cat", "dog")


def images(folder, count=5, shade=0):
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (4, 4), (number * 20, shade, 0)).save(folder / f"{number}.png")


def loaded(folder):
    return tuple(
        as_split(part, name) for part, name in zip(datasets.load(f"folder:{folder}"), ("training", "test"), strict=True)
    )


@pytest.mark.parametrize("test", ["test", "val", "valid", "Validation", "eval", "testing"])
@pytest.mark.parametrize("train", ["train", "Training"])
def test_splits_are_known_by_their_names(train, test, tmp_path):
    """With train/ and val/ a classifier of "train or val?" was trained, and reported 77 %."""
    for name in CLASSES:
        images(tmp_path / train / name)
    images(tmp_path / test / "dog", 3)  # numbered by the classes of the training split
    (tmp_path / ".cache").mkdir()
    first, second = loaded(tmp_path)
    assert first.labels.tolist() == [0] * 5 + [1] * 5
    assert second.labels.tolist() == [1] * 3


def test_test_is_taken_before_val_and_an_unlabelled_one_is_passed_over(tmp_path):
    for name in CLASSES:
        images(tmp_path / "train" / name)
        images(tmp_path / "val" / name, 2)
    images(tmp_path / "test", 7)  # images without classes, as of a competition
    assert loaded(tmp_path)[1].count == 4
    images(tmp_path / "test" / "cat", 3)
    assert loaded(tmp_path)[1].count == 3


@pytest.mark.parametrize("names", [CLASSES, ("bus", "train"), ("exam", "test")])
def test_directories_of_images_are_classes_even_if_one_has_the_name_of_a_split(names, tmp_path):
    for name in names:
        images(tmp_path / name)
    train, test = loaded(tmp_path)
    assert (train.count, test.count) == (8, 2)


def test_a_class_may_hold_directories_of_its_own(tmp_path):
    for name, inside in zip(CLASSES, ("tom", "rex"), strict=True):
        images(tmp_path / name / inside)
    assert loaded(tmp_path)[0].count == 8


UNLIKE = {
    "no test split": (
        ["train/cat", "train/dog"],
        r'train holds classes, and no test, val.*folder:.*/train"\)? takes every fifth',
    ),
    "an unknown second split": (["train/cat", "train/dog", "extra/cat"], "train holds classes, and no test"),
    "splits without classes": (["train", "val"], "train, val look like splits, and hold no directories"),
    "and a third directory": (["train", "val", "more"], "train, val look like splits"),
    "tests alone": (["test", "val"], "test, val look like splits"),
    "splits of other names": (["fold1/cat", "fold1/dog", "fold2/cat"], "fold1 and fold2 both hold a directory cat"),
    "a class that training has not": (["train/cat", "train/dog", "val/cow"], "val has class cow"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_looks_like_splits_and_is_not_is_refused(name, tmp_path):
    folders, words = UNLIKE[name]
    for folder in folders:
        images(tmp_path / folder)
    with pytest.raises(DataError, match=words):
        loaded(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "imagefolder"])
def test_hidden_directories_are_no_classes_and_empty_ones_are_refused(kind, tmp_path):
    for name in CLASSES:
        images(tmp_path / name)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    images(tmp_path / "cat" / ".ipynb_checkpoints")
    (tmp_path / "dog" / "._3.png").write_bytes(b"a note of macOS")
    images(tmp_path / "elsewhere" / "more", 10)
    (tmp_path / "elsewhere").rename(tmp_path.parent / f"{kind} elsewhere")
    (tmp_path / "dog" / "linked").symlink_to(tmp_path.parent / f"{kind} elsewhere")
    (tmp_path / "dog" / "loop").symlink_to(tmp_path / "dog")
    train, test = datasets.load(f"{kind}:{tmp_path}")
    assert sorted([*train.targets, *test.targets]) == [0] * 5 + [1] * 15
    (tmp_path / "cow").mkdir()
    with pytest.raises(DataError, match="found no images in cow, a class"):
        datasets.load(f"{kind}:{tmp_path}")


def test_too_few_images_for_a_test_row_are_told_so(tmp_path):
    for name in CLASSES:
        images(tmp_path / name, 2)
    with pytest.raises(DataError, match=r"found 4 images, of which every fifth is a test row\. Give at least 5"):
        datasets.load(f"folder:{tmp_path}")


@pytest.mark.parametrize("kind", ["png", "tif", "pgm"])
def test_numbers_of_16_bits_keep_their_order_and_those_of_32_are_refused(kind, tmp_path):
    """Pillow makes RGB of them by cutting them off at 255: X-rays and depths were white images, in silence."""
    grey = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1024
    for name in CLASSES:
        images(tmp_path / name)
        (tmp_path / name / "0.png").unlink()
        Image.fromarray(grey).save(tmp_path / name / f"0.{kind}")
    image, _ = datasets.load(f"folder:{tmp_path}")[0][0]
    assert torch.equal(image, torch.arange(64).view(1, 8, 8).expand(3, 8, 8) * 4 / 255)
    if kind == "tif":
        Image.fromarray(grey.astype(np.float32)).save(tmp_path / "cat" / "0.tif")
        with pytest.raises(DataError, match=r"item 0 \(.*0\.tif\) cannot be read: .* 32 bits \(mode F\), of unknown range"):
            as_split(datasets.load(f"folder:{tmp_path}")[0], "training")


def test_the_command_says_so_with_exit_code_2(tmp_path, capsys):
    for folder in ("train", "val"):
        images(tmp_path / folder)
    ran = call(capsys, "--data", f"folder:{tmp_path}", "--mem-limit", "2GB")
    assert refused(ran, 2, "look like splits", "train/CLASS/ and test/CLASS/")


def test_a_test_folder_that_lacks_a_class_keeps_the_numbers_of_training(tmp_path):
    """Each image folder numbered its own classes: with `cat` missing in test, every dog was judged as a cat."""
    for path in ("train/cat/a", "train/dog/a", "test/dog/a"):
        (tmp_path / path).parent.mkdir(parents=True)
        Image.new("RGB", (2, 2)).save((tmp_path / path).with_suffix(".png"))
    train, test = (as_split(part, "some") for part in datasets.load(f"folder:{tmp_path}"))
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1], [1])
