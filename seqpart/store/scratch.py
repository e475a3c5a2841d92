"""Names of homes, rows and checkpoints in a run's directory, and removal of what a run left behind.

Only plain files with names that we give are counted or removed, in directories that are no links. Anything else in them is
the user's.
"""

import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seqpart.files import HALF_WRITTEN, Folder, folder_inside
from seqpart.store.atomic import checked_body
from seqpart.store.direct import explaining

PLAN = "plan.json"
JOB = "job.json"
RESULT = "result.json"
CHECKPOINT = "checkpoint.json"
PREVIOUS = "checkpoint.previous.json"
WEIGHTS = "model.safetensors"
"""File of the trained weights: a directory that holds it holds a finished run."""
EXPORTS = "exports"
"""Folder of weights that were exported while training went on."""
AVERAGE = "average.safetensors"
"""File of the averaged weights, in a run that averages; written before WEIGHTS."""
NEW = ".seqpart-new"
"""Suffix of a result that will replace another when its run is done."""
PUBLISHING = "seqpart-publishing.json"
"""File that lists the results that are replacing earlier ones, or were when the run was killed."""
HOME_FILES = re.compile(r"block-[0-9]+(\.[a-z]+)*\.[0-9]+\.safetensors")
ROWS = re.compile(r"(train|test)(\.[0-9]+)?(-once)?-[0-9]+")
"""Names of rows: the split, its view, `-once` for what all rows share, and the partition that they enter."""
ROW_FILES = re.compile(
    rf"{ROWS.pattern}\.[0-9]+\.(safetensors|sums\.json(\.seqpart-[0-9a-f]{{8}}\.part)?)|(relay|graphs)\.part"
)
FOLDERS = {"homes": HOME_FILES, "rows": ROW_FILES}
_PARTS = {f"{name}.part" for name in (WEIGHTS, AVERAGE, CHECKPOINT, PREVIOUS)}
_NEW_RESULT = re.compile(rf"[\w.-]+{re.escape(NEW)}(\.part)?")


@contextmanager
def own_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A context with a new private directory, removed at the end. Raises StoreError.

    Its path is absolute, and without links: code inside may change the working directory.
    """
    with explaining(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent.resolve()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_scratch(folder: Folder) -> int:
    """Removes homes, rows and half-written results that a run left behind; returns their bytes.

    If there is a checkpoint, which may name them, removes only half-written files.
    """
    freed = remove_half_written(folder)
    if has_checkpoint(folder):
        return freed
    if not folder.holds(PUBLISHING):
        freed += sum(folder.remove(name) for name in folder.names() if _NEW_RESULT.fullmatch(name))
    freed += sum(inside.remove(file) for inside, file in _scratch_files(folder))
    for name in FOLDERS:
        folder.remove_folder(name)
    return freed


def _scratch_files(folder: Folder) -> Iterator[tuple[Folder, str]]:
    """Yields (directory, name) of homes and rows."""
    for name, pattern in FOLDERS.items():
        with folder_inside(folder, name) as inside:
            if inside is not None:
                yield from zip(itertools.repeat(inside), filter(pattern.fullmatch, inside.names()))


def remove_half_written(folder: Folder) -> int:
    """Removes files with which a killed run was about to replace others; returns their bytes."""
    return sum(folder.remove(name) for name in folder.names() if name in _PARTS or HALF_WRITTEN.fullmatch(name))


def scratch_bytes(folder: Folder) -> int:
    return sum(inside.size(file) for inside, file in _scratch_files(folder))


def has_checkpoint(root: Path | Folder) -> bool:
    holds = root.holds if isinstance(root, Folder) else lambda name: os.path.lexists(root / name)
    return any(map(holds, (CHECKPOINT, PREVIOUS)))


def named_scratch(folder: Folder) -> tuple[set[Path], bool]:
    """(directories of homes and rows that the checkpoints in `folder` name, True if all checkpoints could be read)."""
    found, readable = set(), True
    for name in filter(folder.holds, (CHECKPOINT, PREVIOUS)):
        try:
            found.add((folder.path / checked_body("checkpoint", folder.read(name)[0])["scratch"]).resolve())
        except (OSError, ValueError, KeyError, TypeError, RuntimeError):
            readable = False
    return found, readable
