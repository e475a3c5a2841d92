"""Homes, rows and checkpoints by their names: what is in a run's directory, and what goes with it.

Only plain files of names that we give are counted or removed, in directories that are no links. Anything else in them is
the user's.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seqpart.files import HALF_WRITTEN, Folder, folder_inside
from seqpart.store.atomic import checked_body
from seqpart.store.direct import explained

PLAN = "plan.json"
JOB = "job.json"
RESULT = "result.json"
CHECKPOINT = "checkpoint.json"
PREVIOUS = "checkpoint.previous.json"
WEIGHTS = "model.safetensors"
"""A directory that holds it holds a finished run."""
AVERAGE = "average.safetensors"
"""Of a run that averages its weights, these; written before WEIGHTS."""
NEW = ".seqpart-new"
"""Ends the name of a result that is to take another's place when its run is done."""
PUBLISHING = "seqpart-publishing.json"
"""Lists the results that are taking the earlier ones' places this moment, or were when the run was killed."""
HOME_FILES = re.compile(r"block-[0-9]+(\.[a-z]+)*\.[0-9]+\.safetensors")
ROWS = re.compile(r"(train|test)(\.[0-9]+)?(-once)?-[0-9]+")
"""Names of places: of which split, which view of it, what of it is kept once, and the partition that it enters."""
ROW_FILES = re.compile(
    rf"{ROWS.pattern}\.[0-9]+\.(safetensors|sums\.json(\.seqpart-[0-9a-f]{{8}}\.part)?)|(relay|graphs)\.part"
)
FOLDERS = {"homes": HOME_FILES, "rows": ROW_FILES}
_PARTS = {f"{name}.part" for name in (WEIGHTS, AVERAGE, CHECKPOINT, PREVIOUS)}
_NEW_RESULT = re.compile(rf"[\w.-]+{re.escape(NEW)}(\.part)?")


@contextmanager
def own_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new directory that nobody else has or looks into; removed at the end. Raises StoreError.

    Its path is absolute, and without links: what runs inside may change the working directory.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent.resolve()))
    except OSError as error:
        raise explained(error, parent) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_scratch(folder: Folder) -> int:
    """Remove homes, rows and half-written results that a run left behind; returns their bytes.

    Where there is a checkpoint, which may name them, only what was about to take another file's place goes.
    """
    freed = remove_half_written(folder)
    if has_checkpoint(folder):
        return freed
    if not folder.holds(PUBLISHING):
        freed += sum(folder.remove(name) for name in folder.names() if _NEW_RESULT.fullmatch(name))
    for name, pattern in FOLDERS.items():
        with folder_inside(folder, name) as inside:
            if inside is not None:
                freed += sum(inside.remove(file) for file in inside.names() if pattern.fullmatch(file))
        folder.remove_folder(name)
    return freed


def remove_half_written(folder: Folder) -> int:
    """Remove what a killed run was about to put in another file's place; returns its bytes."""
    return sum(folder.remove(name) for name in folder.names() if name in _PARTS or HALF_WRITTEN.fullmatch(name))


def scratch_bytes(folder: Folder) -> int:
    """Of homes and rows."""
    held = 0
    for name, pattern in FOLDERS.items():
        with folder_inside(folder, name) as inside:
            if inside is not None:
                held += sum(inside.size(file) for file in inside.names() if pattern.fullmatch(file))
    return held


def has_checkpoint(root: Path | Folder) -> bool:
    holds = root.holds if isinstance(root, Folder) else lambda name: os.path.lexists(root / name)
    return any(map(holds, (CHECKPOINT, PREVIOUS)))


def named_scratch(folder: Folder) -> tuple[set[Path], bool]:
    """The directories of homes and rows that the checkpoints in `folder` name, and whether all of them could be read."""
    found, readable = set(), True
    for name in filter(folder.holds, (CHECKPOINT, PREVIOUS)):
        try:
            found.add((folder.path / checked_body("checkpoint", folder.read(name)[0])["scratch"]).resolve())
        except (OSError, ValueError, KeyError, TypeError, RuntimeError):
            readable = False
    return found, readable
