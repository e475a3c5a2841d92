"""`folder:DIR`: image files in one directory per class, read once; `imagefolder:DIR`: read in every epoch, with augmentation.

    imagenet   a random part of 8 to 100 % of the image, of a form from 3:4 to 4:3, resized to a square, and a flip; tests: the
               middle of the image, 224 of 256 parts of its shorter side (He et al. 2016, section 3.4)
    cifar      4 pixels of black around, a random square of the old size, and a flip (the same, section 4.2)
    none       the image, resized to a square where a size is given

Splits are told by the names of directories, or are every fifth image:

    DIR/train/CLASS, DIR/val/CLASS    the splits that there are
    DIR/CLASS                         every fifth image of all is a test row

Splits mistaken for classes would train a network to tell training rows from test rows. So splits are recognized by many
names, and directories that only look like splits are refused.

Numbers are from 0 to 1, and with augmentation less their data set's mean, divided by its deviation. Pillow reads the files.
"""

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from seqpart.errors import DataError, OptionError
from seqpart.store.direct import explaining

Augmentation = Literal["imagenet", "cifar", "none"]
_SIZES: dict[str, int | None] = {"imagenet": 224, "cifar": 32, "none": None}
_SCALES = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
"""Mean and deviation of red, green and blue."""
_AREA, _FORM = (0.08, 1.0), (3 / 4, 4 / 3)
_TRIES = 10
_BORDER = 4
_SHOWN = 224 / 256
"""Share of the shorter side that is shown in tests."""
_IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

_TRAINING = ("train", "training", "trainset", "train_set", "training_set")
_TEST = (
    "test", "testing", "testset", "test_set", "val", "valid", "validation", "validate", "val_set", "validation_set",
    "eval", "evaluation", "dev", "holdout",
)  # fmt: skip
"""The first of these that holds classes is the test split."""

Change = Callable[[Any], Any]
Scale = tuple[tuple[float, ...], tuple[float, ...]] | None


def load(folder: Path, kind: str, image_size: int | None, augment: Augmentation | None) -> tuple["Images", "Images"]:
    """Returns (training, test) images (3, height, width): of `imagefolder`, or of `folder`, which are read once.

    Raises DataError where there is no such directory, where classes of the test split are unknown, and for directories that
    look like splits and are not.
    """
    way = augment or ("imagenet" if kind == "imagefolder" else "none")
    if way not in _SIZES:
        raise OptionError(f"--augment: expected {', '.join(_SIZES)}; found {way!r}.")
    changes, scale = _changes(way, image_size or _SIZES[way]), _SCALES.get(way)
    if not folder.is_dir():
        raise DataError(f"--data {kind}:{folder}: no such directory.")
    splits = _splits_of(folder, kind)
    train, test = splits or (folder, folder)
    classes = _classes(train, kind)
    if unknown := sorted(set(_classes(test, kind)) - set(classes)):
        raise DataError(f"--data {kind}:{folder}: {test.name} has class {', '.join(unknown)}, which {train.name} has not.")
    first, second = (_listed(path, classes, kind) for path in (train, test))
    if empty := [name for number, name in enumerate(classes) if number not in first[1]]:
        raise DataError(f"--data {kind}:{train}: found no images in {', '.join(empty)}, a class. Remove it, or give it some.")
    at = np.arange(len(first[1])) % 5 == 4
    if not splits and not at.any():
        raise DataError(
            f"--data {kind}:{folder}: found {len(at)} images, of which every fifth is a test row. Give at least 5, or "
            "train/CLASS and test/CLASS."
        )
    parts = (slice(None), slice(None)) if splits else (~at, at)
    found = zip((train, test), (first, second), parts, changes, strict=True)
    one, other = (Images(path, names[which], labels[which], change, scale) for path, (names, labels), which, change in found)
    one.read_anew = other.read_anew = kind == "imagefolder"
    return one, other


def _splits_of(folder: Path, kind: str) -> tuple[Path, Path] | None:
    """Returns (training, test) directories; None if the directories are classes."""
    inside = _directories(folder)
    named = {path.name.lower(): path for path in inside}
    train = [named[name] for name in _TRAINING if name in named]
    tests = [named[name] for name in _TEST if name in named]
    holding = {path: [part.name for part in _directories(path)] for path in inside}
    if train and holding[train[0]]:
        test = next((path for path in tests if holding[path]), None)
        if test is None:
            raise _unlike_splits(
                folder, f"{train[0].name} holds classes, and no test, val or the like beside it does", kind,
                f"--data {kind}:{train[0]} takes every fifth image of it as a test row",
            )  # fmt: skip
        return train[0], test
    if (train and tests) or (len(train + tests) == len(inside) > 0):
        names = ", ".join(sorted(path.name for path in train + tests))
        raise _unlike_splits(folder, f"{names} look like splits, and hold no directories of classes", kind)
    if shared := _shared_names(holding):
        one, other, name = shared
        raise _unlike_splits(folder, f"{one.name} and {other.name} both hold a directory {name}, as splits do", kind)
    return None


def _shared_names(holding: dict[Path, list[str]]) -> tuple[Path, Path, str] | None:
    """Returns two directories, and the name of a directory in both."""
    seen: dict[str, Path] = {}
    for path, names in holding.items():
        for name in names:
            if name in seen:
                return seen[name], path, name
            seen[name] = path
    return None


def _directories(folder: Path) -> list[Path]:
    with explaining(folder):
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))


def _unlike_splits(folder: Path, found: str, kind: str, other: str = "") -> DataError:
    return DataError(
        f"--data {kind}:{folder}: expected train/CLASS/ and test/CLASS/ (or val, valid, validation, eval), or one "
        f"directory of images per class. Found that {found}. Rename or move the directories{f'; or {other}' if other else ''}."
    )


def _classes(folder: Path, kind: str) -> list[str]:
    found = [path.name for path in _directories(folder)]
    if not found:
        raise _unlike_splits(folder, f"{folder.name} holds no directories of classes", kind)
    return found


def _listed(folder: Path, classes: Sequence[str], kind: str) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """Returns (names below `folder` as bytes, since a million path objects would take 130 MB; class numbers)."""
    names, labels = list[bytes](), list[int]()
    for label, name in enumerate(classes):
        found = sorted(bytes(path.relative_to(folder)) for path in _files(folder / name) if path.suffix.lower() in _IMAGES)
        names += found
        labels += [label] * len(found)
    if not names:
        raise DataError(f"--data {kind}:{folder}: found no images ({', '.join(_IMAGES)}) in directories of classes.")
    return np.array(names), np.array(labels)


class Images:
    """Map-style: (image (3, height, width) of float32, class)."""

    resized_by = ", as --image-size 64 does"
    """The cure where images have several sizes."""
    read_anew = True
    """True if they are read again even without augmentation: as floats an image takes many times its file."""

    def __init__(self, folder: Path, names: Any, labels: Any, change: Change, scale: Scale) -> None:
        self._folder, self._names, self.targets, self._change = folder, names, labels, change
        self._scale = None if scale is None else tuple(np.array(part, np.float32).reshape(3, 1, 1) for part in scale)

    @property
    def samples(self) -> list[tuple[str, int]]:
        """(file, class) of each image."""
        images = zip(self._names, self.targets, strict=True)
        return [(str(self._folder / os.fsdecode(name)), int(label)) for name, label in images]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self._change(_rgb_of(self._folder / os.fsdecode(self._names[index])))
        pixels = np.asarray(image, np.float32).transpose(2, 0, 1) / np.float32(255)
        if self._scale is not None:
            pixels = (pixels - self._scale[0]) / self._scale[1]
        return torch.from_numpy(np.ascontiguousarray(pixels)), int(self.targets[index])


def _files(folder: Path) -> Iterator[Path]:
    """Yields the files below a directory, through links too, but for hidden ones: copies of editors, and macOS' notes."""
    seen = {folder.resolve()}
    for root, inside, files in os.walk(folder, followlinks=True):
        inside[:] = [one for one in inside if not one.startswith(".") and (Path(root) / one).resolve() not in seen]
        seen.update((Path(root) / one).resolve() for one in inside)
        yield from (path for one in files if not one.startswith(".") and (path := Path(root) / one).is_file())


def _rgb_of(path: Path) -> Any:
    """Returns an image of red, green and blue with 8 bits each. Raises ValueError for 32 bits, whose range no file says."""
    from PIL import Image

    with Image.open(path) as image:
        if image.mode in ("I", "F") and image.format != "PPM":  # whose mode of 16 bits is I
            raise ValueError(f"its numbers have 32 bits (mode {image.mode}), of unknown range: save it with 8 or 16")
        if image.mode.startswith("I"):  # convert() would make all above 255 white
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        return image.convert("RGB")


def _changes(kind: str, size: int | None) -> tuple[Change, Change]:
    """Returns (the transform of training images, of test images)."""
    if kind == "none" or size is None:
        return partial(_resized, size), partial(_resized, size)
    if kind == "cifar":
        return partial(_shifted, size), partial(_resized, size)
    return lambda image: _flipped(_to(image, size, random_box(*image.size))), partial(_middle, size)


def _resized(size: int | None, image: Any) -> Any:
    return image if size is None or image.size == (size, size) else _to(image, size)


def _to(image: Any, size: int, box: tuple[float, float, float, float] | None = None) -> Any:
    from PIL import Image

    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Returns a random crop (left, top, right, bottom), drawn from Python's generator."""
    for _ in range(_TRIES):
        area = width * height * random.uniform(*_AREA)
        form = math.exp(random.uniform(*map(math.log, _FORM)))
        across, down = round(math.sqrt(area * form)), round(math.sqrt(area / form))
        if 0 < across <= width and 0 < down <= height:
            left, top = random.randint(0, width - across), random.randint(0, height - down)
            return left, top, left + across, top + down
    across, down = min(width, round(height * _FORM[1])), min(height, round(width / _FORM[0]))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def _shifted(size: int, image: Any) -> Any:
    left, top = (random.randint(-_BORDER, _BORDER) for _ in range(2))
    # Beyond its borders an image is black.
    return _flipped(_resized(size, image).crop((left, top, left + size, top + size)))


def _middle(size: int, image: Any) -> Any:
    side = _SHOWN * min(image.size)
    left, top = ((length - side) / 2 for length in image.size)
    return _to(image, size, (left, top, left + side, top + side))


def _flipped(image: Any) -> Any:
    from PIL import Image

    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image
