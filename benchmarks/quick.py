"""The quick form that every benchmark has: `--quick` does all that the benchmark does, on little and in seconds, to see that it
runs. What it finds is kept nowhere, and rows that a benchmark needs are made up.
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

DOCS = Path(__file__).parents[1] / "docs"


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="all of it on little, in seconds, to see that it runs; kept nowhere"
    )


@contextlib.contextmanager
def places(quick: bool) -> Iterator[Path]:
    """Yields where pages and pictures go: docs/, or if `quick` a directory that takes the results, too, and goes with them."""
    from benchmarks import record  # not before: it imports torch

    if not quick:
        yield DOCS
        return
    with tempfile.TemporaryDirectory() as folder, patch.object(record, "FOLDER", Path(folder)):
        yield Path(folder)


def printed(module: str, *words: object, **_: object) -> dict[str, Any]:
    """As children.printed, but in this process, which has imported torch already."""
    said = io.StringIO()
    with patch.object(sys, "argv", [module, *map(str, words)]), contextlib.redirect_stdout(said):
        importlib.import_module(module).main()
    found: dict[str, Any] = json.loads(said.getvalue().splitlines()[-1])
    return found


def need(*packages: str) -> None:
    """Ends the program in one sentence where one of them is not installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        sys.exit(f"This benchmark needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def data(folder: Path) -> Path:
    """Writes rows as the files that the papers' benchmarks read, each class a picture with noise, and returns `folder`."""
    import numpy as np

    chance = np.random.default_rng(0)

    def rows(count: int, classes: int, *shape: int) -> tuple[Any, Any]:
        labels = np.arange(count) % classes
        return chance.integers(0, 200, (classes, *shape))[labels] + chance.integers(0, 50, (count, *shape)), labels

    for place, classes, count in (("EMNIST47/raw", 47, 9_870), ("MNIST/raw", 10, 200)):
        (folder / place).mkdir(parents=True)
        for name, values in zip(("images-idx3", "labels-idx1"), rows(count, classes, 28, 28), strict=True):
            for split, part in (("train", values), ("t10k", values[: 2 * classes])):
                head = struct.pack(f">4B{part.ndim}i", 0, 0, 8, part.ndim, *part.shape)
                (folder / place / f"{split}-{name}-ubyte").write_bytes(head + part.astype(np.uint8).tobytes())
    (folder / "cifar10-subset").mkdir()
    images, labels = rows(200, 10, 3, 32, 32)
    for split, count in (("train", 200), ("test", 20)):
        np.savez(folder / "cifar10-subset" / f"{split}.npz", images=images[:count].astype(np.uint8), labels=labels[:count])
    (folder / "tinyshakespeare").mkdir()
    (folder / "tinyshakespeare" / "input.txt").write_text("to be or not to be, that is the question. " * 200)
    return folder
