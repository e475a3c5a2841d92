"""Directories that a run owns: a marker says that we made it, a lock says that a live run uses it.

Nothing is deleted here but files that a run of ours made under names of ours.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import time
from pathlib import Path

from seqpart.direct import explained
from seqpart.errors import DirectoryUnusable, OptionError, StoreError

MARKER = "seqpart-run.json"
SCRATCH_PREFIX = "seqpart-"
"""Directories under --offload-dir are named so; they hold no results and go when the run ends."""
_LOCK = "seqpart.lock"
_SCRATCH = ("homes", "rows")
_WEIGHTS = "model.safetensors"
"""A directory that holds it holds a finished run."""
_NEW = ".seqpart-new"
_numbers = itertools.count()


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
            raise _unusable(error, root) from None
        try:
            self.cleaned = clear_scratch(root)
            self._replaces = (root / _WEIGHTS).exists()
            self.mark("running")
            for name in _SCRATCH:
                (root / name).mkdir(exist_ok=True)
        except OSError as error:
            os.close(self._lock)
            raise _unusable(error, root) from None

    @property
    def homes(self) -> Path:
        return self.root / "homes"

    @property
    def rows(self) -> Path:
        return self.root / "rows"

    def result(self, name: str) -> Path:
        """Where to write the result `name`: beside that of an earlier run, which stays until `publish`."""
        return self.root / (name + _NEW if self._replaces else name)

    def publish(self) -> None:
        """The run is done: let its results take the place of the earlier ones."""
        try:
            for path in self.root.glob("*" + _NEW):
                path.replace(path.with_name(path.name.removesuffix(_NEW)))
        except OSError as error:
            raise _unusable(error, self.root) from None

    def mark(self, state: str) -> None:
        text = {"made by": "seqpart", "state": state, "pid": os.getpid(), "time": time.strftime("%Y-%m-%d %H:%M:%S")}
        write_text(self.root / MARKER, json.dumps(text) + "\n")

    def close(self, state: str) -> None:
        """Remove the scratch files, note how the run ended, and let go of the lock."""
        try:
            clear_scratch(self.root)
            if self.root.exists():
                self.mark(state)
        except (OSError, StoreError):
            if state == "done":
                raise
            # A run that failed has its own error to tell, and the next run cleans up.
        finally:
            os.close(self._lock)

    def vanish(self) -> None:
        """For a scratch directory of ours: remove it altogether."""
        try:
            clear_scratch(self.root)
            _remove_empty(self.root)
        finally:
            os.close(self._lock)


def write_text(path: Path, text: str) -> None:
    """Replace a small file atomically and durably."""
    if path.is_dir():
        raise DirectoryUnusable(f"cannot make {path}: it is a directory. Give a path in a directory that you may write to.")
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise _unusable(error, path) from None


def _unusable(error: OSError, path: Path) -> StoreError:
    """As `explained`, for a path that is being made: what is missing was not there before either."""
    if error.errno in (errno.ENOENT, errno.EEXIST):
        return DirectoryUnusable(f"cannot make {path}: {error.strerror}. Give a path in a directory that you may write to.")
    return explained(error, path)


def clear_scratch(root: Path) -> int:
    """Remove homes, rows and half-written results that a run left behind; returns their bytes."""
    freed = 0
    for file in [*root.glob(f"*{_NEW}*"), *root.glob(f"{_WEIGHTS}.part")]:
        freed += _removed(file)
    for name in _SCRATCH:
        folder = root / name
        if not folder.is_dir():
            continue
        for file in [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.part")]:
            freed += _removed(file)
        if not any(folder.iterdir()):
            folder.rmdir()
    return freed


def _removed(file: Path) -> int:
    size = file.stat().st_size
    file.unlink()
    return size


def _remove_empty(root: Path) -> None:
    """Remove a directory of ours that holds nothing but the marker and the lock."""
    if {path.name for path in root.iterdir()} <= {MARKER, _LOCK}:
        for name in (MARKER, _LOCK):
            (root / name).unlink(missing_ok=True)
        root.rmdir()


def clear_leftovers(parent: Path) -> tuple[int, int]:
    """Clean the scratch of killed runs beside ours: (directories, bytes). Runs that live keep their lock and their files."""
    found = freed = 0
    for marker in sorted(parent.glob(f"*/{MARKER}")):
        root, size = marker.parent, 0
        try:
            lock = _locked(root / _LOCK)
        except (OSError, DirectoryUnusable):
            continue
        try:
            size = clear_scratch(root)
            if root.name.startswith(SCRATCH_PREFIX):
                _remove_empty(root)
        except OSError:  # another user's, perhaps: not ours to clean
            continue
        finally:
            os.close(lock)
            found, freed = found + bool(size), freed + size
    return found, freed


def new_name(method: str) -> str:
    """A name that no other run has, in this process or another."""
    number = next(_numbers)
    return time.strftime("%Y%m%d-%H%M%S") + f"-{method}-{os.getpid()}" + (f"-{number}" if number else "")


def _must_be_ours(root: Path, overwrite: bool) -> None:
    if not root.is_dir():
        raise OptionError(f"--output-dir: {root} is a file, not a directory.")
    if all(path.name == _LOCK for path in root.iterdir()):  # empty, or a run that begins this very moment
        return
    if not (root / MARKER).exists():
        raise OptionError(f"--output-dir: {root} holds files that seqpart did not make. Give a new or empty directory.")
    if (root / _WEIGHTS).exists() and not overwrite:
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
