"""Directories of images, one per class, split by directory names or by every fifth image.

    DIR/train/CLASS, DIR/val/CLASS    the splits that there are
    DIR/CLASS                         every fifth image of all is a test row

Splits mistaken for classes would train a network to tell training rows from test rows. So splits are recognized by many
names, and directories that only look like splits are refused.
"""

from pathlib import Path

from seqpart.errors import DataError
from seqpart.store.direct import explained

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

TRAINING = ("train", "training", "trainset", "train_set", "training_set")
TEST = (
    "test", "testing", "testset", "test_set", "val", "valid", "validation", "validate", "val_set", "validation_set",
    "eval", "evaluation", "dev", "holdout",
)  # fmt: skip
"""The first of these that holds classes is the test split."""


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
