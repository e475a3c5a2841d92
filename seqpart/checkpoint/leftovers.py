"""Directories that other runs left beside this one: which are needed, and which may be deleted.

    live         a run holds its lock                                                        left alone
    resumable    a checkpoint needs it: its own, or one of the run that its marker names     left alone, counted
    leftover     killed without a checkpoint; or its run is in place and does not name it    cleaned up
    unknown      moved, copied, not mounted, damaged: it may be needed or not                 left alone, reported

The first check takes no lock; a directory to be cleaned is locked, and checked again. Other users' directories are not opened.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from seqpart.checkpoint.marker import LOCK, MARKER, Marker, finish_publishing, lives, locked, marker_of
from seqpart.errors import StoreError, shown
from seqpart.files import Folder, folder_inside
from seqpart.store.scratch import clear_scratch, has_checkpoint, named_scratch, scratch_bytes
from seqpart.units import format_size

IGNORE = ".gitignore"
"""Keeps the files of a seqpart directory out of the git repository around it."""
_NAMED = 3
"""Most interrupted runs that a message names."""
SCRATCH_PREFIX = "seqpart-"
"""Prefix of directories under --offload-dir; they hold no results and are removed when the run ends."""


class Kind(Enum):
    LIVE = "live"
    RESUMABLE = "resumable"
    LEFTOVER = "leftover"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Leftover:
    path: Path
    kind: Kind
    run: Path | None = None
    """The run that can be resumed from it."""
    why: str = ""
    """Why its kind is unknown."""
    held: int = 0
    """Bytes of homes and rows."""


def classified(folder: Folder, *, is_locked: bool = False) -> Leftover | None:
    """Returns the kind of a seqpart directory; None for any other directory. is_locked: true if the caller holds its lock."""
    path = folder.path
    try:
        marker = marker_of(folder)
    except ValueError as error:
        held = scratch_bytes(folder)
        return Leftover(path, Kind.UNKNOWN, why=str(error), held=held) if held else None
    if marker is None:
        return None
    held = scratch_bytes(folder)
    if not is_locked and lives(folder):
        return Leftover(path, Kind.LIVE)
    if marker.directory != path:
        return Leftover(path, Kind.UNKNOWN, why=f"it was copied or moved from {marker.directory}", held=held)
    if has_checkpoint(folder):
        return Leftover(path, Kind.RESUMABLE, run=path, held=held)
    if marker.run is None:
        return Leftover(path, Kind.LEFTOVER, held=held)
    return _classified_by_its_run(path, marker, held)


def _classified_by_its_run(path: Path, marker: Marker, held: int) -> Leftover:
    """Judges the homes and rows of a run elsewhere: a leftover only if that run is in its place and does not name them."""
    run = marker.run
    assert run is not None
    try:
        with Folder.at(run) as folder:
            found = marker_of(folder)
            named, readable = named_scratch(folder)
    except (OSError, ValueError):
        return Leftover(path, Kind.UNKNOWN, why=f"its run {run} does not exist, or cannot be read", held=held)
    if found is None or (found.directory, found.id, found.run) != (run, marker.run_id, None):
        return Leftover(path, Kind.UNKNOWN, why=f"its run was moved from {run}, where there is another now", held=held)
    if path in named or not readable:
        return Leftover(path, Kind.RESUMABLE, run=run, held=held)
    return Leftover(path, Kind.LEFTOVER, held=held)


def belongs_to(scratch: Path, run: Marker) -> bool:
    """True if `scratch` was made for this very run, and neither was moved since."""
    try:
        with Folder.at(scratch) as folder:
            marker = marker_of(folder)
            own = folder.uid == os.geteuid()
    except (OSError, ValueError):
        return False
    return own and marker is not None and (
        (marker.directory, marker.run, marker.run_id) == (scratch.resolve(), run.directory, run.id)
    )  # fmt: skip


def clean(path: Path) -> int:
    """Removes the contents of a leftover directory, and the directory if it holds nothing else; returns the bytes.

    Does nothing if it is no leftover any more. Raises DirectoryUnusable if it is in use, other StoreErrors, OSError.
    """
    lock = locked(path, wait=0)
    try:
        with Folder.at(path.parent) as parent, parent.inside(path.name) as folder:
            found = classified(folder, is_locked=True) if folder.uid == os.geteuid() else None
            if found is None or found.kind is not Kind.LEFTOVER:
                return 0
            finish_publishing(path)
            freed = clear_scratch(folder)
            if path.name.startswith(SCRATCH_PREFIX):
                remove_empty(folder)
            return freed
    finally:
        os.close(lock)


def remove_empty(folder: Folder) -> None:
    """Removes a seqpart directory that holds nothing but the marker, the lock and the ignore file."""
    if set(folder.names()) <= {IGNORE, MARKER, LOCK} and folder.is_at(folder.path):
        for name in (IGNORE, MARKER, LOCK):
            folder.remove(name)
        with contextlib.suppress(OSError):
            folder.path.rmdir()


def _beside(parent: Path) -> Iterator[Leftover]:
    """Yields the seqpart directories under `parent`."""
    try:
        opened = Folder.at(parent.resolve())
    except OSError:
        return
    with opened as folder:
        for name in folder.names():
            with folder_inside(folder, name) as inside, contextlib.suppress(OSError):
                found = classified(inside) if inside is not None and inside.uid == os.geteuid() else None
                if found is not None:
                    yield found


def clear_leftovers(parent: Path) -> tuple[int, int]:
    """Removes the leftovers of killed runs under `parent`. Returns (directories, bytes)."""
    found = freed = 0
    for leftover in _beside(parent):
        if leftover.kind is Kind.LEFTOVER:
            with contextlib.suppress(OSError, StoreError):  # in use by now, or another user's
                size = clean(leftover.path)
                found, freed = found + bool(size), freed + size
    return found, freed


def resumable(parent: Path) -> dict[Path, int]:
    """Returns the runs with homes or rows under `parent` that can be resumed, and the bytes that they hold there."""
    held: dict[Path, int] = {}
    for one in _beside(parent):
        if one.kind is Kind.RESUMABLE and one.run is not None:
            held[one.run] = held.get(one.run, 0) + one.held
    return held


def unknown(parent: Path) -> list[Leftover]:
    """Returns the directories under `parent` that may be needed or not."""
    return [one for one in _beside(parent) if one.kind is Kind.UNKNOWN]


def _named(runs: dict[Path, int]) -> str:
    names = [shown(run) for run in sorted(runs, key=lambda run: (-runs[run], run))[:_NAMED]]
    return ", ".join(names) + (f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else "")


def report_leftovers(parent: Path, cleaned: int) -> Iterator[str]:
    """Cleans up beside a run, and yields messages on what was removed and what is left. cleaned: bytes removed in its own
    directory."""
    found, freed = clear_leftovers(parent)
    if found or cleaned:
        yield f"cleaned up {format_size(freed + cleaned)} that killed runs had left"
    if waiting := resumable(parent):
        held = format_size(sum(waiting.values()))
        yield (
            f"{len(waiting)} interrupted run(s) beside this one hold {held}: {_named(waiting)}. Resume each with "
            "--resume DIR, or from the script that started it, or remove it"
        )
    for one in unknown(parent):
        if not one.held:  # a copy of a finished run holds only results
            continue
        yield f"{shown(one.path)} ({format_size(one.held)}) is kept: {one.why}. Remove it if no run needs it."
