"""What runs left beside this one: who needs it, and what may be deleted.

    live         a run holds its lock                                                        left alone
    resumable    a checkpoint needs it: its own, or one of the run that its marker names     left alone, counted
    leftover     killed without a checkpoint; or its run is in its place and names it not    cleaned up
    unknown      moved, copied, not mounted, damaged: nobody can say who needs it            left alone, told

Looking takes no lock; what is to be cleaned is locked, and looked at again. Other users' directories are not looked into.
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
"""Keeps what is in a directory of ours out of the repository that the directory lies in."""
_NAMED = 3
"""Of the interrupted runs beside one."""
SCRATCH_PREFIX = "seqpart-"
"""Directories under --offload-dir are named so; they hold no results and go when the run ends."""


class Kind(Enum):
    LIVE = "live"
    RESUMABLE = "resumable"
    LEFTOVER = "leftover"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Judged:
    path: Path
    kind: Kind
    run: Path | None = None
    """The run that can go on from it."""
    why: str = ""
    """Of what is not known."""
    held: int = 0
    """Bytes of homes and rows."""


def judged(folder: Folder, *, is_locked: bool = False) -> Judged | None:
    """What a directory of ours is; None for one that is not. `is_locked`: by the caller."""
    path = folder.path
    try:
        marker = marker_of(folder)
    except ValueError as error:
        held = scratch_bytes(folder)
        return Judged(path, Kind.UNKNOWN, why=str(error), held=held) if held else None
    if marker is None:
        return None
    held = scratch_bytes(folder)
    if not is_locked and lives(folder):
        return Judged(path, Kind.LIVE)
    if marker.directory != path:
        return Judged(path, Kind.UNKNOWN, why=f"it was copied or moved from {marker.directory}", held=held)
    if has_checkpoint(folder):
        return Judged(path, Kind.RESUMABLE, run=path, held=held)
    if marker.run is None:
        return Judged(path, Kind.LEFTOVER, held=held)
    return _judged_by_its_run(path, marker, held)


def _judged_by_its_run(path: Path, marker: Marker, held: int) -> Judged:
    """Homes and rows of a run elsewhere: nobody's only where that run is in its place, and its checkpoints name others."""
    run = marker.run
    assert run is not None
    try:
        with Folder.at(run) as folder:
            found = marker_of(folder)
            named, readable = named_scratch(folder)
    except (OSError, ValueError):
        return Judged(path, Kind.UNKNOWN, why=f"its run {run} is not there, or not readable", held=held)
    if found is None or (found.directory, found.id, found.run) != (run, marker.run_id, None):
        return Judged(path, Kind.UNKNOWN, why=f"its run was moved from {run}, where there is another now", held=held)
    if path in named or not readable:
        return Judged(path, Kind.RESUMABLE, run=run, held=held)
    return Judged(path, Kind.LEFTOVER, held=held)


def belongs_to(scratch: Path, run: Marker) -> bool:
    """Whether `scratch` was made for this very run, and both are where they were then."""
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
    """Remove what is in a leftover directory, and the directory if it holds nothing else; returns the bytes.

    Nothing is done where it is no leftover any more. Raises DirectoryUnusable where it is in use, other StoreErrors, OSError.
    """
    lock = locked(path, wait=0)
    try:
        with Folder.at(path.parent) as parent, parent.inside(path.name) as folder:
            found = judged(folder, is_locked=True) if folder.uid == os.geteuid() else None
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
    """Remove a directory of ours that holds nothing but the marker, the lock and the ignore file."""
    if set(folder.names()) <= {IGNORE, MARKER, LOCK} and folder.is_at(folder.path):
        for name in (IGNORE, MARKER, LOCK):
            folder.remove(name)
        with contextlib.suppress(OSError):
            folder.path.rmdir()


def _beside(parent: Path) -> Iterator[Judged]:
    """Directories of ours under `parent`."""
    try:
        opened = Folder.at(parent.resolve())
    except OSError:
        return
    with opened as folder:
        for name in folder.names():
            with folder_inside(folder, name) as inside, contextlib.suppress(OSError):
                found = judged(inside) if inside is not None and inside.uid == os.geteuid() else None
                if found is not None:
                    yield found


def clear_leftovers(parent: Path) -> tuple[int, int]:
    """Clean what killed runs beside ours left: (directories, bytes)."""
    found = freed = 0
    for leftover in _beside(parent):
        if leftover.kind is Kind.LEFTOVER:
            with contextlib.suppress(OSError, StoreError):  # in use since, or not ours to clean
                size = clean(leftover.path)
                found, freed = found + bool(size), freed + size
    return found, freed


def resumable(parent: Path) -> dict[Path, int]:
    """Runs with homes or rows under `parent` that ended early and can be resumed, and the bytes that they hold there."""
    held: dict[Path, int] = {}
    for one in _beside(parent):
        if one.kind is Kind.RESUMABLE and one.run is not None:
            held[one.run] = held.get(one.run, 0) + one.held
    return held


def unknown(parent: Path) -> list[Judged]:
    """Directories under `parent` that may be needed, or not."""
    return [one for one in _beside(parent) if one.kind is Kind.UNKNOWN]


def _named(runs: dict[Path, int]) -> str:
    """Those that hold most."""
    names = [shown(run) for run in sorted(runs, key=lambda run: (-runs[run], run))[:_NAMED]]
    return ", ".join(names) + (f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else "")


def tell_leftovers(parent: Path, cleaned: int) -> Iterator[str]:
    """Clean up beside a run that has `cleaned` so many bytes in its own directory, and say what was done and what is left."""
    found, freed = clear_leftovers(parent)
    if found or cleaned:
        yield f"cleaned up {format_size(freed + cleaned)} that killed runs had left"
    if waiting := resumable(parent):
        held = format_size(sum(waiting.values()))
        yield (
            f"{len(waiting)} interrupted run(s) beside this one hold {held}: {_named(waiting)}. Go on with each by "
            "--resume DIR, in its script where one began it, or remove it"
        )
    for one in unknown(parent):
        if not one.held:  # the copy of a finished run holds results alone
            continue
        yield f"{shown(one.path)} ({format_size(one.held)}) is kept: {one.why}. Remove it if no run needs it."
