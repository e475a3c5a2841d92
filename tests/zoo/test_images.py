"""`imagefolder:DIR`: real files of images, read anew in every epoch, with augmentation."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from seqpart import Trainer
from seqpart.errors import DataError, OptionError
from seqpart.zoo import datasets
from seqpart.zoo.images import random_box
from tests.command import call

CLASSES = ("cat", "dog")


def write_images(folder, each=4, size=(12, 9), kind="png"):
    chance = np.random.default_rng(0)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for number in range(each):
            Image.fromarray(chance.integers(0, 256, (*size, 3), np.uint8)).save(folder / name / f"{number}.{kind}")
    return folder


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path / "images" / "train")
    write_images(tmp_path / "images" / "val", 2)
    return tmp_path / "images"


@pytest.mark.parametrize("test", ["val", "valid", "test"])
@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_splits_and_classes_are_known_by_their_directories(test, kind, tmp_path):
    write_images(tmp_path / "train", kind=kind)
    write_images(tmp_path / test, 2, kind=kind)
    train, tested = datasets.load(f"imagefolder:{tmp_path}", image_size=8)
    assert (len(train), len(tested)) == (8, 4)
    assert train.targets.tolist() == [0] * 4 + [1] * 4
    assert tested.targets.tolist() == [0, 0, 1, 1]
    assert {tuple(part[i][0].shape) for part in (train, tested) for i in range(4)} == {(3, 8, 8)}


def test_without_splits_every_fifth_image_is_a_test_row(tmp_path):
    write_images(tmp_path, 5)
    train, test = datasets.load(f"imagefolder:{tmp_path}", augment="none")
    assert (train.targets.tolist(), test.targets.tolist()) == ([0] * 4 + [1] * 4, [0, 1])


def test_a_file_s_name_may_be_of_any_bytes(tmp_path):
    write_images(tmp_path, 5)
    (tmp_path / "cat" / "0.png").rename(os.fsdecode(bytes(tmp_path / "cat") + b"/\xe9\xff.png"))
    train, _ = datasets.load(f"imagefolder:{tmp_path}", augment="none")
    assert len([train[number] for number in range(len(train))]) == len(train.samples) == 8


def test_without_augmentation_pixels_are_those_of_the_file(folder):
    train, _ = datasets.load(f"imagefolder:{folder}", augment="none")
    with Image.open(folder / "train" / "cat" / "0.png") as file:
        expected = np.asarray(file, np.float32).transpose(2, 0, 1) / np.float32(255)
    assert np.array_equal(train[0][0].numpy(), expected)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6))
def test_a_random_part_lies_in_the_image_and_has_a_form_and_an_area_as_asked(width, height, seed):
    random.seed(seed)
    left, top, right, bottom = random_box(width, height)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    if min(width, height) > 30:
        assert 0.65 < (right - left) / (bottom - top) < 1.5
        assert (right - left) * (bottom - top) > 0.07 * width * height


@pytest.mark.parametrize("augment", ["imagenet", "cifar"])
def test_augmentation_draws_anew_and_tests_do_not(augment, folder):
    train, test = datasets.load(f"imagefolder:{folder}", image_size=32, augment=augment)
    drawn = {train[0][0].numpy().tobytes() for _ in range(8)}
    assert len(drawn) > 2
    assert len({test[0][0].numpy().tobytes() for _ in range(4)}) == 1
    random.seed(5)
    one = train[0][0]
    random.seed(5)
    assert torch.equal(train[0][0], one)


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2))


@pytest.mark.parametrize("augment", ["imagenet", "none"])
@pytest.mark.few(1)
def test_workers_change_no_bit_and_rows_are_not_kept(augment, folder, tmp_path):
    runs = []
    for workers in (0, 2):
        torch.manual_seed(0)
        train, test = datasets.load(f"imagefolder:{folder}", image_size=16, augment=augment)
        result = Trainer(
            network(), method="full", mem_limit="2GB", epochs=2, batch_size=4, workers=workers, quiet=True,
            output_dir=tmp_path / str(workers),
        ).fit(train, test)  # fmt: skip
        runs.append((result.weights.read_bytes(), result.train_losses, result.test_loss))
        assert not any("lie in memory" in reason for reason in result.plan.reasons)
    assert runs[0] == runs[1]


def test_a_damaged_image_is_named(folder, tmp_path):
    (folder / "train" / "dog" / "1.png").write_bytes(b"no image")
    train, test = datasets.load(f"imagefolder:{folder}", image_size=16)
    trainer = Trainer(network(), method="full", mem_limit="2GB", quiet=True, output_dir=tmp_path / "run")
    with pytest.raises(DataError, match=r"item 5 \(.*dog/1\.png\) cannot be read: UnidentifiedImageError: "):
        trainer.fit(train, test)
    whole = (folder / "train" / "dog" / "0.png").read_bytes()
    (folder / "train" / "dog" / "1.png").write_bytes(whole[: len(whole) // 2])  # then the library's words name no file
    with pytest.raises(DataError, match=r"item 5 \(.*dog/1\.png\) cannot be read: "):
        trainer.fit(train, test)


def test_what_is_no_folder_of_images_is_refused_in_words(tmp_path, folder, capsys):
    with pytest.raises(DataError, match="no such directory"):
        datasets.load(f"imagefolder:{tmp_path / 'nowhere'}")
    with pytest.raises(DataError, match="found no images"):
        (tmp_path / "empty" / "cat").mkdir(parents=True)
        datasets.load(f"imagefolder:{tmp_path / 'empty'}")
    with pytest.raises(DataError, match="has class wolf, which train has not"):
        (folder / "val" / "wolf").mkdir()
        datasets.load(f"imagefolder:{folder}")
    with pytest.raises(OptionError, match=r"augment goes with"):
        datasets.load("digits", augment="cifar")
    ran = call(capsys, "--mem-limit", "2GB", "--data", f"imagefolder:{folder}", "--augment", "much")
    assert (ran.code, "expected one of imagenet, cifar, none; found 'much'" in ran.err) == (2, True)
