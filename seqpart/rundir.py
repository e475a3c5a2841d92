"""Directories that a run owns: a marker says that we made it, a lock says that a live run uses it.

Nothing is deleted here but files that a run of ours made under names of ours.
"""

import fcntl
import json
import os
import time
from pathlib import Path

from seqpart.direct import explained
from seqpart.errors import DirectoryUnusable, OptionError

MARKER = "seqpart-run.json"
_LOCK = "seqpart.lock"
_SCRATCH = ("homes", "rows")


class RunDirectory:
    """`root` with its lock held, `scratch` (homes of blocks and boundary rows) and the results beside them.

    Raises DirectoryUnusable where it cannot be written or another run holds it, OptionError where it holds someone
    else's files or a finished run that `overwrite` does not cover.
    """

    def __init__(self, root: Path, *, overwrite: bool = False) -> None:
        self.root = root
        try:
            created = not root.exists()
            root.mkdir(parents=True, exist_ok=True)
            if not created:
                _must_be_ours(root, overwrite)
            self._lock = _locked(root / _LOCK)
        except OSError as error:
            raise explained(error, root) from None
        self.cleaned = clear_scratch(root)
        self.mark("running")
        for name in _SCRATCH:
            (root / name).mkdir(exist_ok=True)

    @property
    def homes(self) -> Path:
        return self.root / "homes"

    @property
    def rows(self) -> Path:
        return self.root / "rows"

    def mark(self, state: str) -> None:
        text = {"made by": "seqpart", "state": state, "pid": os.getpid(), "time": time.strftime("%Y-%m-%d %H:%M:%S")}
        write_text(self.root / MARKER, json.dumps(text) + "\n")

    def close(self, state: str) -> None:
        """Remove the scratch files, note how the run ended, and let go of the lock."""
        clear_scratch(self.root)
        if self.root.exists():
            self.mark(state)
        os.close(self._lock)

    def vanish(self) -> None:
        """For a scratch directory of ours: remove it altogether."""
        clear_scratch(self.root)
        os.close(self._lock)
        for name in (MARKER, _LOCK):
            (self.root / name).unlink(missing_ok=True)
        self.root.rmdir()


def write_text(path: Path, text: str) -> None:
    """Replace a small file atomically and durably."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise explained(error, path) from None


def clear_scratch(root: Path) -> int:
    """Remove homes and rows that a run left behind; returns their bytes."""
    freed = 0
    for name in _SCRATCH:
        folder = root / name
        if not folder.is_dir():
            continue
        for file in [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.part")]:
            freed += file.stat().st_size
            file.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
    return freed


def clear_leftovers(parent: Path) -> tuple[int, int]:
    """Clean the scratch of killed runs beside ours: (directories, bytes). Runs that live keep their lock and their files."""
    found = freed = 0
    for marker in sorted(parent.glob(f"*/{MARKER}")):
        try:
            lock = _locked(marker.parent / _LOCK)
        except (OSError, DirectoryUnusable):
            continue
        try:
            size = clear_scratch(marker.parent)
        finally:
            os.close(lock)
        found, freed = found + bool(size), freed + size
    return found, freed


def new_name(method: str) -> str:
    return time.strftime("%Y%m%d-%H%M%S") + f"-{method}-{os.getpid()}"


def _must_be_ours(root: Path, overwrite: bool) -> None:
    if not root.is_dir():
        raise OptionError(f"--output-dir: {root} is a file, not a directory.")
    inside = list(root.iterdir())
    if not inside:
        return
    if not (root / MARKER).exists():
        raise OptionError(f"--output-dir: {root} holds files that seqpart did not make. Give a new or empty directory.")
    if (root / "model.safetensors").exists() and not overwrite:
        raise OptionError(
            f"--output-dir: {root} holds a finished run. Give another directory, or --overwrite to replace its results."
        )


def _locked(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise DirectoryUnusable(
            f"{path.parent} is in use by another run. Wait for it to end, or give another --output-dir."
        ) from None
    return handle
