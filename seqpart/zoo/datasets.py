"""Data sets by name: `digits`, `mnist`, `idx:DIR`, ... Each comes as a pair of Splits that open their files anew for
every pass, so that none of them stays in memory while a model trains."""

import gzip
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from seqpart.errors import DataError, OptionError
from seqpart.ingest import ROWS_AT_ONCE, Split
from seqpart.zoo.loading import imported

NAMES = ("digits", "mnist", "fashion-mnist", "emnist")
PREFIXES = ("idx:", "npz:", "folder:")


def load(name: str, *, data_dir: Path | None = None, download: bool = False, image_size: int | None = None) -> tuple[Any, Any]:
    """(training, test) data. Raises DataError for missing or damaged files, OptionError for unknown names."""
    prefix, _, rest = name.partition(":")
    if image_size is not None and prefix != "folder":
        raise OptionError(f"--image-size goes with --data folder:DIR; found --data {name}.")
    if prefix not in ("mnist", "fashion-mnist", "emnist") and (download or data_dir is not None):
        raise OptionError(f"--data-dir and --download go with mnist, fashion-mnist and emnist; found --data {name}.")
    if name == "digits":
        return digits()
    if name in NAMES:
        return _torchvision(name, data_dir, download)
    if prefix == "idx":
        return _idx(Path(rest))
    if prefix == "npz":
        return _npz(Path(rest))
    if prefix == "folder":
        return _folder(Path(rest), image_size)
    if rest:
        found = imported(name, "--data")()
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise DataError(f"--data {name}: expected a pair (training, test); found {type(found).__name__}.")
        return found[0], found[1]
    raise OptionError(
        f"--data: expected {', '.join(NAMES)}, idx:DIR, npz:FILE, folder:DIR or package.module:function; found {name!r}."
    )


def digits() -> tuple[Split, Split]:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, from 0 to 1; every fifth row is a test row."""
    table = _digits_table()
    x, y = torch.from_numpy(table[:, :64]).to(torch.float32) / 16, torch.from_numpy(table[:, 64]).to(torch.int64)
    return every_fifth(x, y)


def _digits_table() -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    # The file is read without importing scikit-learn, whose 57 MB would count against the limit.
    spec = importlib.util.find_spec("sklearn")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.exists():
            return np.loadtxt(path, delimiter=",")
    raise DataError("--data digits: scikit-learn's digits.csv.gz was not found. Install scikit-learn, or give another --data.")


def every_fifth(x: torch.Tensor, y: torch.Tensor) -> tuple[Split, Split]:
    """A fixed 80/20 split: rows 4, 9, 14, ... are the test rows."""
    test = torch.arange(len(y)) % 5 == 4
    return _split("training", x[~test], y[~test]), _split("test", x[test], y[test])


def _split(name: str, x: torch.Tensor, y: torch.Tensor) -> Split:
    return Split(name=name, count=len(y), shape=tuple(x.shape[1:]), labels=y, open=lambda: torch.split(x, ROWS_AT_ONCE))


def _torchvision(name: str, data_dir: Path | None, download: bool) -> tuple[Split, Split]:
    from torchvision import datasets

    if data_dir is None:
        raise OptionError(
            f"--data {name} needs --data-dir, the directory that holds (or, with --download, will hold) the files."
        )
    kind = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST, "emnist": datasets.EMNIST}[name]
    extra = {"split": "balanced"} if name == "emnist" else {}

    def opened(train: bool) -> Any:
        try:
            return kind(str(data_dir), train=train, download=download, **extra)
        except (RuntimeError, OSError) as error:
            cure = "" if download else " Give --download to fetch it."
            raise DataError(f"--data {name}: not found or damaged in {data_dir}: {str(error).splitlines()[0]}.{cure}") from None

    def split(title: str, train: bool) -> Split:
        found = opened(train)
        # EMNIST's images lie on their side in the files.
        turn: Callable[[torch.Tensor], torch.Tensor] = (lambda x: x.transpose(1, 2)) if name == "emnist" else (lambda x: x)

        def passes() -> Iterator[torch.Tensor]:
            for rows in opened(train).data.split(ROWS_AT_ONCE):
                yield turn(rows).unsqueeze(1).to(torch.float32) / 255

        return Split(name=title, count=len(found), shape=(1, *found.data.shape[1:]), labels=found.targets.clone(), open=passes)

    return split("training", True), split("test", False)


def _idx(folder: Path) -> tuple[Split, Split]:
    """MNIST-like files `*train*images*idx3-ubyte`, `*test*` or `t10k*`, plain or .gz; images (1, rows, columns), 0 to 1."""
    if not folder.is_dir():
        raise DataError(f"--data idx:{folder}: no such directory.")
    return _idx_split(folder, "training", ("train",)), _idx_split(folder, "test", ("test", "t10k"))


def _idx_split(folder: Path, title: str, words: tuple[str, ...]) -> Split:
    images, labels = (_idx_file(folder, words, kind) for kind in ("images", "labels"))
    with _unzipped(images) as file:
        shape = _idx_header(file, images, 3)
    with _unzipped(labels) as file:
        (count,) = _idx_header(file, labels, 1)
        y = torch.from_numpy(np.frombuffer(_exactly(file, count, labels), np.uint8).astype(np.int64))
    if shape[0] != count:
        raise DataError(f"{images} has {shape[0]} images and {labels} {count} labels; the numbers must be equal.")

    def passes() -> Iterator[torch.Tensor]:
        with _unzipped(images) as file:
            _idx_header(file, images, 3)
            for start in range(0, count, ROWS_AT_ONCE):
                rows = min(ROWS_AT_ONCE, count - start)
                raw = np.frombuffer(_exactly(file, rows * shape[1] * shape[2], images), np.uint8)
                yield torch.from_numpy(raw.reshape(rows, 1, *shape[1:]).astype(np.float32) / 255)

    return Split(name=title, count=count, shape=(1, *shape[1:]), labels=y, open=passes)


def _idx_file(folder: Path, words: tuple[str, ...], kind: str) -> Path:
    found = [
        path for path in sorted(folder.iterdir())
        if kind in path.name and "ubyte" in path.name and any(word in path.name for word in words)
    ]  # fmt: skip
    if not found:
        raise DataError(
            f"--data idx:{folder}: no file with {' or '.join(words)} and {kind!r} in its name, ending in ubyte or ubyte.gz."
        )
    return found[0]


def _unzipped(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


def _idx_header(file: BinaryIO, path: Path, dimensions: int) -> tuple[int, ...]:
    head = _exactly(file, 4 + 4 * dimensions, path)
    if head[:3] != b"\0\0\x08" or head[3] != dimensions:
        raise DataError(f"{path} is not an idx file of {dimensions} dimension(s) of bytes: it starts with {head[:4].hex()}.")
    return tuple(int(n) for n in np.frombuffer(head[4:], ">i4"))


def _exactly(file: BinaryIO, size: int, path: Path) -> bytes:
    try:
        data = file.read(size)
    except (OSError, EOFError) as error:
        raise DataError(f"{path} is damaged: {error}.") from None
    if len(data) < size:
        raise DataError(f"{path} is damaged: it ends {size - len(data)} bytes too early.")
    return data


def _npz(path: Path) -> tuple[Split, Split]:
    """x_train, y_train, x_test, y_test; or images and labels (x and y), with test.npz beside train.npz or every fifth row."""
    if not path.is_file():
        raise DataError(f"--data npz:{path}: no such file.")
    names = _npz_names(path)
    if {"x_train", "y_train", "x_test", "y_test"} <= names:
        return _npz_split(path, "training", "x_train", "y_train"), _npz_split(path, "test", "x_test", "y_test")
    pair = next((pair for pair in (("images", "labels"), ("x", "y")) if set(pair) <= names), None)
    if pair is None:
        raise DataError(
            f"{path}: expected arrays x_train, y_train, x_test, y_test, or images and labels; found {sorted(names)}."
        )
    beside = path.with_name("test.npz")
    if path.name == "train.npz" and beside.is_file():
        return _npz_split(path, "training", *pair), _npz_split(beside, "test", *pair)
    return (
        _npz_split(path, "training", *pair, keep=lambda i: i % 5 != 4),
        _npz_split(path, "test", *pair, keep=lambda i: i % 5 == 4),
    )


def _npz_names(path: Path) -> set[str]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return set(file.files)
    except Exception as error:  # zipfile, zlib and numpy each raise their own
        raise DataError(f"{path} is damaged or not an npz file: {error}.") from None


def _npz_array(path: Path, name: str) -> "np.ndarray[Any, Any]":
    try:
        with np.load(path, allow_pickle=False) as file:
            array: np.ndarray[Any, Any] = file[name]
            return array
    except Exception as error:
        raise DataError(f"{path}: array {name!r} is missing or damaged: {error}.") from None


def _npz_split(path: Path, title: str, x: str, y: str, keep: Callable[[Any], Any] = lambda i: i >= 0) -> Split:
    labels = _npz_array(path, y).reshape(-1)
    array = _npz_array(path, x)
    if len(array) != len(labels):
        raise DataError(f"{path}: {len(array)} rows in {x} and {len(labels)} in {y}; the numbers must be equal.")
    chosen = np.flatnonzero(keep(np.arange(len(labels))))
    scale = 255.0 if array.dtype == np.uint8 else 1.0
    shape = array.shape[1:]
    del array

    def passes() -> Iterator[torch.Tensor]:
        rows = _npz_array(path, x)
        for start in range(0, len(chosen), ROWS_AT_ONCE):
            yield torch.from_numpy(rows[chosen[start : start + ROWS_AT_ONCE]].astype(np.float32) / scale)

    targets = labels[chosen]
    y_tensor = torch.from_numpy(targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64))
    return Split(name=title, count=len(chosen), shape=shape, labels=y_tensor, open=passes)


def _folder(folder: Path, image_size: int | None) -> tuple[Any, Any]:
    """Images in train/CLASS and test/CLASS, or in CLASS with every fifth one a test row; (3, height, width), 0 to 1."""
    if not folder.is_dir():
        raise DataError(f"--data folder:{folder}: no such directory.")
    from torchvision import datasets, transforms

    steps = [transforms.Resize((image_size, image_size))] if image_size else []
    change = transforms.Compose([*steps, transforms.ToTensor()])

    def images(path: Path) -> Any:
        try:
            return datasets.ImageFolder(str(path), transform=change)
        except (FileNotFoundError, OSError) as error:
            raise DataError(
                f"--data folder:{path}: {str(error).splitlines()[0]}. Expected one directory of images per class."
            ) from None

    if (folder / "train").is_dir() and (folder / "test").is_dir():
        return images(folder / "train"), images(folder / "test")
    found = images(folder)
    return _Part(found, [i for i in range(len(found)) if i % 5 != 4]), _Part(
        found, [i for i in range(len(found)) if i % 5 == 4]
    )


class _Part:
    """Some items of a map-style data set."""

    def __init__(self, items: Any, chosen: list[int]) -> None:
        self._items, self._chosen = items, chosen
        self.targets = [items.targets[i] for i in chosen]

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Any:
        return self._items[self._chosen[index]]
