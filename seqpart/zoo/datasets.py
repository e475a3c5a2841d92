"""Data sets by name: `digits`, `mnist`, `idx:DIR`, ... Each is a pair of Splits that open their files for every pass, so that
they do not stay in memory during training."""

import gzip
import importlib.util
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from seqpart.data.labels import as_labels
from seqpart.data.splits import ROWS_AT_ONCE, Split
from seqpart.errors import DataError, OptionError, first_line, refusing
from seqpart.text import nearest, refuse_unusable
from seqpart.zoo import images, text, tokenized
from seqpart.zoo.libraries import called

NAMES = ("digits", "mnist", "fashion-mnist", "emnist")
_MNISTS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "emnist": "EMNIST"}
"""torchvision's classes, which are also the names of its directories."""

LARGEST_IMAGE = 4096
"""Pixels a side: 200 MB as floats, for one row."""
Array = npt.NDArray[Any]


def load(
    name: str, *, data_dir: Path | None = None, download: bool = False, image_size: int | None = None,
    context: int | None = None, augment: images.Augmentation | None = None, tokenizer: Path | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Returns (training, test) data; None for a missing test set. tokenizer: its directory, for hf-text:FILE.

    Raises DataError for missing or damaged files, OptionError for unknown names.
    """
    prefix, _, rest = name.partition(":")
    if prefix in ("idx", "npz", "folder", "imagefolder", "text", "hf-text"):
        refuse_unusable("--data", Path(rest))
    for option, given, kinds in (
        ("--augment", augment, {"imagefolder": "DIR"}), ("--image-size", image_size, {"folder": "DIR", "imagefolder": "DIR"}),
        ("--context", context, {"text": "FILE", "hf-text": "FILE"}),
    ):  # fmt: skip
        if given is not None and prefix not in kinds:
            of = " or ".join(f"{kind}:{place}" for kind, place in kinds.items())
            raise OptionError(f"{option} goes with --data {of}; found --data {name}.")
    if image_size is not None and not 1 <= image_size <= LARGEST_IMAGE:
        raise OptionError(f"--image-size: expected pixels from 1 up, and at most {LARGEST_IMAGE}; found {image_size}.")
    if name not in _MNISTS and (download or data_dir is not None):
        raise OptionError(f"--data-dir and --download go with {', '.join(_MNISTS)}; found --data {name}.")
    if name == "digits":
        return digits()
    if name in _MNISTS:
        return _mnist(name, data_dir, download)
    reads: dict[str, Callable[[Path], tuple[Any, Any]]] = {
        "idx": lambda path: _idx(path, f"--data {name}"), "npz": _npz, "text": lambda path: text.load(path, context),
        **dict.fromkeys(("folder", "imagefolder"), lambda path: images.load(path, prefix, image_size, augment)),
        "hf-text": lambda path: tokenized.load(path, tokenizer, context),
    }  # fmt: skip
    if prefix in reads and rest:
        return reads[prefix](Path(rest))
    if rest:
        found = called(name, "--data")
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise DataError(
                f"--data {name}: expected a pair (training, test), where test may be None; found {type(found).__name__}."
            )
        return found[0], found[1]
    kind = "npz:" if name.endswith(".npz") else "text:" if name.endswith(".txt") else ""
    hint = f" Did you mean {kind}{name}?" if kind else nearest([name], NAMES)
    raise OptionError(
        f"--data: expected {', '.join(NAMES)}, idx:DIR, npz:FILE, folder:DIR, imagefolder:DIR, text:FILE, hf-text:FILE or "
        f"package.module:function; found {name!r}.{hint}"
    )


def digits() -> tuple[Split, Split]:
    """Returns scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, from 0 to 1; every fifth row is a test row."""
    table = digits_table()
    x, y = torch.from_numpy(table[:, :64]).to(torch.float32) / 16, torch.from_numpy(table[:, 64]).to(torch.int64)
    test = torch.arange(len(y)) % 5 == 4
    return _split("training", x[~test], y[~test]), _split("test", x[test], y[test])


def digits_table() -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    """Reads the file without importing scikit-learn, whose 57 MB would count against the limit. Raises DataError."""
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.exists():
            return np.loadtxt(path, delimiter=",")
    raise DataError("--data digits: scikit-learn's digits.csv.gz was not found. Install scikit-learn, or give another --data.")


def _split(name: str, x: torch.Tensor, y: torch.Tensor) -> Split:
    return Split(name=name, count=len(y), shape=tuple(x.shape[1:]), labels=y, open=lambda: torch.split(x, ROWS_AT_ONCE))


def _mnist(name: str, data_dir: Path | None, download: bool) -> tuple[Split, Split]:
    """Returns MNIST and similar sets from torchvision's directories. Reading with torchvision would load a whole set."""
    if data_dir is None:
        raise OptionError(
            f"--data {name} needs --data-dir, the directory that holds (or, with --download, will hold) the files."
        )
    if download:
        _fetch(name, data_dir)
    folder = data_dir / _MNISTS[name] / "raw"
    cure = "" if download else " Give --download to fetch it, or --data idx:DIR for files in a directory of their own."
    try:
        return _idx(folder, f"--data {name}", prefix="emnist-balanced-" if name == "emnist" else "", turn=name == "emnist")
    except DataError as error:
        raise DataError(f"{error.with_flags}{cure}") from None


def _fetch(name: str, data_dir: Path) -> None:
    from torchvision import datasets

    extra = {"split": "balanced"} if name == "emnist" else {}
    try:
        getattr(datasets, _MNISTS[name])(str(data_dir), download=True, **extra)
    except (RuntimeError, OSError) as error:
        raise DataError(f"--data {name}: could not be fetched into {data_dir}: {first_line(error)}.") from None


def _idx(folder: Path, asked: str, *, prefix: str = "", turn: bool = False) -> tuple[Split, Split]:
    """Reads files `*train*images*idx3-ubyte`, `*test*` or `t10k*`, plain or .gz, as images (1, rows, columns) from 0 to 1.

    turn: the images in the files are transposed, as EMNIST's are.
    """
    if not folder.is_dir():
        raise DataError(f"{asked}: expected the files in {folder}, but there is no such directory.")

    def split(title: str, *words: str) -> Split:
        images, labels = (_idx_file(folder, prefix, words, kind, asked) for kind in ("images", "labels"))
        return _idx_split(images, labels, title, turn)

    return split("training", "train"), split("test", "test", "t10k")


def _idx_file(folder: Path, prefix: str, words: tuple[str, ...], kind: str, asked: str) -> Path:
    found = [
        path for path in sorted(folder.iterdir())
        if path.is_file() and path.name.startswith(prefix) and kind in path.name and "ubyte" in path.name
        and any(word in path.name for word in words)
    ]  # fmt: skip
    if not found:
        raise DataError(
            f"{asked}: expected a file with {' or '.join(words)} and {kind} in its name, ending in ubyte or ubyte.gz, in "
            f"{folder}; found none."
        )
    if len({path.name.removesuffix(".gz") for path in found}) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(f"{asked}: {folder} holds several sets: {names}. Give a directory with one of them.")
    return found[0]


def _idx_split(images: Path, labels: Path, title: str, turn: bool) -> Split:
    with _unzipped(images) as file:
        shape = _idx_header(file, images, 3)
        if max(shape[1:]) > LARGEST_IMAGE:
            raise DataError(f"{images}: expected images of at most {LARGEST_IMAGE} pixels a side; its header says {shape[1:]}.")
    with _unzipped(labels) as file:
        (count,) = _idx_header(file, labels, 1)
        y = torch.from_numpy(np.frombuffer(_exactly(file, count, labels), np.uint8).astype(np.int64))
        _ended(file, labels)
    if shape[0] != count:
        raise DataError(f"{images} has {shape[0]} images and {labels} has {count} labels; the numbers must be equal.")

    def passes() -> Iterator[torch.Tensor]:
        with _unzipped(images) as file:
            _idx_header(file, images, 3)
            for start in range(0, count, ROWS_AT_ONCE):
                rows = min(ROWS_AT_ONCE, count - start)
                raw = np.frombuffer(_exactly(file, rows * shape[1] * shape[2], images), np.uint8)
                x = torch.from_numpy(raw.reshape(rows, 1, *shape[1:]).astype(np.float32) / 255)
                yield x.transpose(2, 3) if turn else x
            _ended(file, images)

    sides = shape[:0:-1] if turn else shape[1:]
    return Split(name=title, count=count, shape=(1, *sides), labels=y, open=passes)


def _unzipped(path: Path) -> BinaryIO:
    try:
        return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from None


def _idx_header(file: BinaryIO, path: Path, dimensions: int) -> tuple[int, ...]:
    head = _exactly(file, 4 + 4 * dimensions, path)
    if head[:3] != b"\0\0\x08" or head[3] != dimensions:
        raise DataError(f"{path} is not an idx file of {dimensions} dimension(s) of bytes: it starts with {head[:4].hex()}.")
    shape = tuple(int(n) for n in np.frombuffer(head[4:], ">i4"))
    if min(shape) < 0:
        raise DataError(f"{path} is damaged: its header says shape {shape}. Fetch it again.")
    return shape


def _read(file: BinaryIO, size: int, path: Path) -> bytes:
    try:
        return file.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}. Fetch it again.") from None


def _exactly(file: BinaryIO, size: int, path: Path) -> bytes:
    data = _read(file, size, path)
    if len(data) < size:
        raise DataError(f"{path} is damaged: it ends {size - len(data)} bytes too early. Fetch it again.")
    return data


def _ended(file: BinaryIO, path: Path) -> None:
    """Raises DataError unless the file ends here. Reading past its end also makes gzip compare the checksum."""
    if _read(file, 1, path):
        raise DataError(f"{path} is damaged: it is longer than its header says. Fetch it again.")


def _npz(path: Path) -> tuple[Split, Split | None]:
    """x_train, y_train, and x_test, y_test where there is a test set; or images and labels (x and y), with test.npz beside
    train.npz or every fifth row. path: the file, or the directory of train.npz."""
    if path.is_dir():
        path /= "train.npz"
    if not path.is_file():
        raise DataError(f"--data npz:{path}: no such file.")
    with _archive(path) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}
    if {"x_train", "y_train"} <= names and not {"x_test", "y_test"} & names:
        return _npz_split(path, "training", "x_train", "y_train"), None
    if {"x_train", "y_train", "x_test", "y_test"} <= names:
        return _npz_split(path, "training", "x_train", "y_train"), _npz_split(path, "test", "x_test", "y_test")
    pair = next((pair for pair in (("images", "labels"), ("x", "y")) if set(pair) <= names), None)
    if pair is None:
        raise DataError(
            f"{path}: expected arrays x_train, y_train, x_test and y_test, or images and labels, or x and y; "
            f"found {', '.join(sorted(names)) or 'none'}."
        )
    beside = path.with_name("test.npz")
    if path.name == "train.npz" and beside.is_file():
        return _npz_split(path, "training", *pair), _npz_split(beside, "test", *pair)
    train = _npz_split(path, "training", *pair, keep=lambda i: i % 5 != 4)
    return train, _npz_split(path, "test", *pair, keep=lambda i: i % 5 == 4)


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    cure = "Write it again with numpy.savez."
    # zipfile, zlib and numpy's header each have errors of their own: TokenError, RuntimeError, ...
    refusal = refusing(lambda error: DataError(f"{path} is damaged or not an npz file: {error}. {cure}"))
    with refusal, zipfile.ZipFile(path) as archive:
        yield archive


def _npz_rows(path: Path, name: str) -> "tuple[tuple[int, ...], np.dtype[Any], Callable[[], Iterator[Array]]]":
    """Returns (shape, type, a function that streams the rows of one array): numpy.load would hold them all."""

    def opened(archive: zipfile.ZipFile) -> "tuple[IO[bytes], tuple[int, ...], bool, np.dtype[Any]]":
        with ExitStack() as undo:
            file = undo.enter_context(archive.open(f"{name}.npy"))
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, by_columns, dtype = read(file)
            size = archive.getinfo(f"{name}.npy").file_size - file.tell()
            if dtype.kind in "buif" and (min(shape, default=0) < 0 or size != dtype.itemsize * math.prod(shape)):
                raise ValueError(f"{name} has {size} bytes, and its header says {dtype} of shape {shape}")
            undo.pop_all()
        return file, shape, by_columns, dtype

    with _archive(path) as archive:
        file, shape, by_columns, dtype = opened(archive)
        file.close()
    if not shape or dtype.kind not in "buif":
        raise DataError(f"{path}: expected {name} to be rows of numbers; found shape {shape}, type {dtype}.")

    def stream() -> Iterator[Array]:
        with _archive(path) as archive, opened(archive)[0] as file:
            if by_columns:  # every row is spread over the whole file
                whole = np.frombuffer(file.read(), dtype).reshape(shape, order="F")
                yield from (whole[at : at + ROWS_AT_ONCE] for at in range(0, shape[0], ROWS_AT_ONCE))
                return
            size = dtype.itemsize * math.prod(shape[1:])
            for at in range(0, shape[0], ROWS_AT_ONCE):
                rows = min(ROWS_AT_ONCE, shape[0] - at)
                yield np.frombuffer(_exactly(file, rows * size, path), dtype).reshape(rows, *shape[1:])  # type: ignore[arg-type]
            _ended(file, path)  # type: ignore[arg-type]

    return shape, dtype, stream


def _npz_split(path: Path, title: str, x: str, y: str, keep: Callable[[Any], Any] = lambda i: i >= 0) -> Split:
    label_shape, label_dtype, label_stream = _npz_rows(path, y)
    shape, dtype, stream = _npz_rows(path, x)
    if shape[0] != label_shape[0]:
        raise DataError(f"{path}: {shape[0]} rows in {x} and {label_shape[0]} in {y}; the numbers must be equal.")
    chosen = np.flatnonzero(keep(np.arange(shape[0])))
    scale = 255.0 if dtype == np.uint8 else 1.0

    def passes() -> Iterator[torch.Tensor]:
        start = 0
        for rows in stream():
            kept = rows[keep(np.arange(start, start + len(rows)))]
            start += len(rows)
            with np.errstate(over="ignore"):  # infinity is refused where rows are looked at
                yield torch.from_numpy(kept.astype(np.float32) / np.float32(scale))

    kind = np.float32 if label_dtype.kind == "f" else np.int64
    own = () if math.prod(label_shape) == label_shape[0] else label_shape[1:]
    labels = np.concatenate([np.zeros((0, *own), kind), *(rows.reshape(-1, *own).astype(kind) for rows in label_stream())])
    if label_dtype.kind == "u" and (labels < 0).any():
        raise DataError(f"{path}: expected labels in {y} to be classes that count from 0; found one of 2**63 or more.")
    return Split(name=title, count=len(chosen), shape=shape[1:], labels=as_labels(labels[chosen], title), open=passes)
