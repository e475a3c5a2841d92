"""`imagefolder:DIR`: image files in one directory per class, read again in every epoch, with augmentation.

    imagenet   a random part of 8 to 100 % of the image, of a form from 3:4 to 4:3, resized to a square, and a flip; tests: the
               middle of the image, 224 of 256 parts of its shorter side (He et al. 2016, section 3.4)
    cifar      4 pixels of black around, a random square of the old size, and a flip (the same, section 4.2)
    none       the image, resized to a square where a size is given

Numbers are from 0 to 1, and with augmentation less their data set's mean, divided by its deviation. Pillow reads the files.
"""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from seqpart.errors import DataError, OptionError
from seqpart.zoo.folders import IMAGES, directories, splits_of, unlike_splits

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

Change = Callable[[Any], Any]


def load(folder: Path, image_size: int | None, augment: Augmentation | None) -> tuple["Images", "Images"]:
    """Returns (training, test) images (3, size, size). Raises DataError as `folders.load` does."""
    if not folder.is_dir():
        raise DataError(f"--data imagefolder:{folder}: no such directory.")
    kind = augment or "imagenet"
    if kind not in _SIZES:
        raise OptionError(f"--augment: expected {', '.join(_SIZES)}; found {kind!r}.")
    size = image_size or _SIZES[kind]
    train, test = _changes(kind, size)
    splits = splits_of(folder, "imagefolder")
    if splits is None:
        found = _listed(folder, _classes(folder))
        at = np.arange(len(found[1])) % 5 == 4
        return _images(folder, found, ~at, train, kind), _images(folder, found, at, test, kind)
    classes = _classes(splits[0])
    unknown = sorted(set(_classes(splits[1])) - set(classes))
    if unknown:
        raise DataError(f"--data imagefolder:{folder}: {splits[1].name} has class {', '.join(unknown)}, which train has not.")
    first, second = (_listed(path, classes) for path in splits)
    everything = slice(None)
    return _images(splits[0], first, everything, train, kind), _images(splits[1], second, everything, test, kind)


def _classes(folder: Path) -> list[str]:
    found = [path.name for path in directories(folder)]
    if not found:
        raise unlike_splits(folder, f"{folder.name} holds no directories of classes", "imagefolder")
    return found


def _listed(folder: Path, classes: Sequence[str]) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """Returns (names below `folder` as bytes, since a million path objects would take 130 MB; class numbers)."""
    names, labels = list[bytes](), list[int]()
    for label, name in enumerate(classes):
        below = folder / name
        found = sorted(
            bytes(path.relative_to(folder)) for path in below.rglob("*") if path.suffix.lower() in IMAGES and path.is_file()
        )
        names += found
        labels += [label] * len(found)
    if not names:
        raise DataError(f"--data imagefolder:{folder}: found no images ({', '.join(IMAGES)}) in directories of classes.")
    return np.array(names), np.array(labels)


def _images(folder: Path, found: tuple[Any, Any], which: Any, change: Change, kind: str) -> "Images":
    return Images(folder, found[0][which], found[1][which], change, _SCALES.get(kind))


class Images:
    """Map-style: (image (3, height, width) of float32, class)."""

    read_anew = True
    """Read again even without augmentation: as floats an image takes many times its file."""

    def __init__(
        self, folder: Path, names: Any, labels: Any, change: Change, scale: tuple[tuple[float, ...], tuple[float, ...]] | None
    ) -> None:
        self._folder, self._names, self.targets, self._change = folder, names, labels, change
        self._scale = None if scale is None else tuple(np.array(part, np.float32).reshape(3, 1, 1) for part in scale)

    @property
    def samples(self) -> list[tuple[str, int]]:
        """(file, class) of each image."""
        return [(str(self._folder / name.decode()), int(label)) for name, label in zip(self._names, self.targets, strict=True)]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        with Image.open(self._folder / self._names[index].decode()) as file:
            image = self._change(file.convert("RGB"))
        pixels = np.asarray(image, np.float32).transpose(2, 0, 1) / np.float32(255)
        if self._scale is not None:
            pixels = (pixels - self._scale[0]) / self._scale[1]
        return torch.from_numpy(np.ascontiguousarray(pixels)), int(self.targets[index])


def _changes(kind: str, size: int | None) -> tuple[Change, Change]:
    """Returns (the transform of training images, of test images)."""
    if kind == "none" or size is None:
        return _resized(size), _resized(size)
    if kind == "cifar":
        return _shifted(size), _resized(size)
    return _cropped(size), _middle(size)


def _resized(size: int | None) -> Change:
    return lambda image: image if size is None or image.size == (size, size) else _to(image, size)


def _to(image: Any, size: int, box: tuple[float, float, float, float] | None = None) -> Any:
    from PIL import Image

    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


def _cropped(size: int) -> Change:
    return lambda image: _flipped(_to(image, size, random_box(*image.size)))


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


def _shifted(size: int) -> Change:
    def change(image: Any) -> Any:
        left, top = (random.randint(-_BORDER, _BORDER) for _ in range(2))
        # Beyond its borders an image is black.
        return _flipped(_resized(size)(image).crop((left, top, left + size, top + size)))

    return change


def _middle(size: int) -> Change:
    def change(image: Any) -> Any:
        side = _SHOWN * min(image.size)
        left, top = ((length - side) / 2 for length in image.size)
        return _to(image, size, (left, top, left + side, top + side))

    return change


def _flipped(image: Any) -> Any:
    from PIL import Image

    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image
