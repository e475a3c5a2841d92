"""`folder:DIR`: images in one directory per class, split by directory names or by every fifth image.

    DIR/train/CLASS, DIR/val/CLASS    the splits that there are
    DIR/CLASS                         every fifth image of all is a test row

Splits mistaken for classes would train a network to tell training rows from test rows. So splits are recognized by many
names, and directories that only look like splits are refused.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqpart.errors import DataError
from seqpart.store.direct import explained

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

TRAINING = ("train", "training", "trainset", "train_set", "training_set")
TEST = (
    "test", "testing", "testset", "test_set", "val", "valid", "validation", "validate", "val_set", "validation_set",
    "eval", "evaluation", "dev", "holdout",
)  # fmt: skip
"""The first of these that holds classes is the test split."""
_RESIZED_BY = ", as --image-size 64 does"
"""Cure in errors about images of several sizes."""


def load(folder: Path, image_size: int | None) -> tuple[Any, Any]:
    """Returns (training, test) sets of images (3, height, width) from 0 to 1.

    Raises DataError where there is no such directory, where classes of the test split are unknown, and for directories that
    look like splits and are not.
    """
    if not folder.is_dir():
        raise DataError(f"--data folder:{folder}: no such directory.")
    splits = splits_of(folder, "folder")
    if splits is not None:
        train, test = (_images(path, image_size) for path in splits)
        return train, _Part(test, range(len(test)), _numbered_as(train, test, *splits))
    found = _images(folder, image_size)
    parts = [[i for i in range(len(found)) if (i % 5 == 4) is is_test] for is_test in (False, True)]
    train, test = (_Part(found, part, [found.targets[i] for i in part]) for part in parts)
    return train, test


def splits_of(folder: Path, kind: str) -> tuple[Path, Path] | None:
    """Returns (training, test) directories; None if the directories are classes."""
    inside = directories(folder)
    named = {path.name.lower(): path for path in inside}
    train = [named[name] for name in TRAINING if name in named]
    tests = [named[name] for name in TEST if name in named]
    holding = {path: [part.name for part in directories(path)] for path in inside}
    if train and holding[train[0]]:
        test = next((path for path in tests if holding[path]), None)
        if test is None:
            raise unlike_splits(
                folder, f"{train[0].name} holds classes, and no test, val or the like beside it does", kind,
                f"--data {kind}:{train[0]} takes every fifth image of it as a test row",
            )  # fmt: skip
        return train[0], test
    if (train and tests) or (len(train + tests) == len(inside) > 0):
        names = ", ".join(sorted(path.name for path in train + tests))
        raise unlike_splits(folder, f"{names} look like splits, and hold no directories of classes", kind)
    shared = _shared_names(holding)
    if shared:
        one, other, name = shared
        raise unlike_splits(folder, f"{one.name} and {other.name} both hold a directory {name}, as splits do", kind)
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


def directories(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    except OSError as error:
        raise explained(error, folder) from None


def unlike_splits(folder: Path, found: str, kind: str, other: str = "") -> DataError:
    return DataError(
        f"--data {kind}:{folder}: expected train/CLASS/ and test/CLASS/ (or val, valid, validation, eval), or one "
        f"directory of images per class. Found that {found}. Rename or move the directories{f'; or {other}' if other else ''}."
    )


def _images(path: Path, image_size: int | None) -> Any:
    from torchvision import datasets, transforms

    steps = [transforms.Resize((image_size, image_size))] if image_size else []
    try:
        change = transforms.Compose([*steps, transforms.ToTensor()])
        found = datasets.ImageFolder(str(path), transform=change, is_valid_file=_is_image)
    except OSError as error:
        raise DataError(f"--data folder:{path}: expected one directory of images per class. {error}.") from None
    found.resized_by = _RESIZED_BY
    return found


def _is_image(path: str) -> bool:
    """True for a regular file with an image's suffix: a pipe would block."""
    return path.lower().endswith(IMAGES) and Path(path).is_file()


def _numbered_as(train: Any, test: Any, train_path: Path, test_path: Path) -> list[int]:
    """Returns labels of `test` with the class numbers of `train`; each directory numbers its own names."""
    unknown = sorted(set(test.classes) - set(train.classes))
    if unknown:
        raise DataError(
            f"--data folder:{train_path.parent}: {test_path.name} has class {', '.join(unknown)}, which train has not."
        )
    return [train.class_to_idx[test.classes[label]] for label in test.targets]


class _Part:
    """Some items of a map-style data set, with labels of our own."""

    resized_by = _RESIZED_BY

    def __init__(self, items: Any, chosen: Sequence[int], targets: list[int]) -> None:
        self._items, self._chosen, self.targets = items, chosen, targets

    @property
    def samples(self) -> list[tuple[str, int]]:
        """The file of each."""
        return [self._items.samples[number] for number in self._chosen]

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Any:
        return self._items[self._chosen[index]][0], self.targets[index]
