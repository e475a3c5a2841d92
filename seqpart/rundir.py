"""Directories that a run owns: a marker says that we made it, a lock says that a live run uses it.

Nothing is deleted here but files that a run of ours made under names of ours, and nothing at all of a run that has a
checkpoint to go on from. Scratch directories under --offload-dir name the directory of their run; they belong to its
checkpoint as long as that names them back.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from seqpart.direct import PROBE, explained, sync
from seqpart.errors import BadInput, CorruptFile, DirectoryUnusable, Interrupted, OptionError, StoreError

MARKER = "seqpart-run.json"
SCRATCH_PREFIX = "seqpart-"
"""Directories under --offload-dir are named so; they hold no results and go when the run ends."""
CHECKPOINT = "checkpoint.json"
PREVIOUS = "checkpoint.previous.json"
SCRATCH = ("*.safetensors", "*.sums.json", "*.part")
"""Files in a folder of homes or rows."""
_LOCK = "seqpart.lock"
_FOLDERS = ("homes", "rows")
_WEIGHTS = "model.safetensors"
"""A directory that holds it holds a finished run."""
_NEW = ".seqpart-new"
_PROBE_SECONDS = 60
"""A probe file that nobody has written for so long has no process any more."""
_numbers = itertools.count()


class RunDirectory:
    """`root` with its lock held, `scratch` (homes of blocks and boundary rows) and the results beside them.

    `overwrite` lets go of an earlier run's checkpoint, and of its results once there are new ones; `resume` opens the
    directory of a run that has a checkpoint, and keeps everything. `run` is the directory of the run that this one is
    the scratch directory of.

    Raises DirectoryUnusable where it cannot be written or another run holds it, OptionError where it holds someone
    else's files, a finished run that `overwrite` does not cover or one that could be resumed.
    """

    def __init__(self, root: Path, *, overwrite: bool = False, resume: bool = False, run: Path | None = None) -> None:
        self.root, self._run = root, run
        if resume and not root.exists():
            raise CorruptFile(f"{root} is missing: the checkpoint in {run or root} needs it.")
        try:
            created = not root.exists()
            root.mkdir(parents=True, exist_ok=True)
            if not created:
                _must_be_ours(root)
            self._lock = _locked(root / _LOCK)
        except OSError as error:
            raise _unusable(error, root) from None
        try:
            self._take_over(overwrite, resume)
        except OSError as error:
            os.close(self._lock)
            raise _unusable(error, root) from None
        except BaseException:
            os.close(self._lock)
            raise

    def _take_over(self, overwrite: bool, resume: bool) -> None:
        if overwrite and not resume:
            forget_checkpoint(self.root)
        elif not resume:
            _must_be_free(self.root)
        self.cleaned = 0 if resume else clear_scratch(self.root)
        self._replaces = (self.root / _WEIGHTS).exists()
        self.mark("running")
        for name in _FOLDERS:
            (self.root / name).mkdir(exist_ok=True)

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
        if self._run is not None:
            text["run"] = str(self._run.resolve())
        write_text(self.root / MARKER, json.dumps(text) + "\n")

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A signal that nobody held back ends the run, and leaves the checkpoint of before."""
        try:
            yield
        except Interrupted:
            raise
        except KeyboardInterrupt:
            if has_checkpoint(self.root):
                raise Interrupted(self.root) from None
            raise

    @contextlib.contextmanager
    def resumable(self) -> Iterator[None]:
        """What ends the run from outside does not end it for good: say how to go on."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, BadInput) and has_checkpoint(self.root):
                error.add_note(f"The last checkpoint is intact: when the cause is gone, go on with --resume {self.root}")
            raise

    def close(self, state: str) -> None:
        """Note how the run ended and let go of the lock. What a checkpoint needs stays, unless the run is "done"."""
        try:
            if state == "done":
                forget_checkpoint(self.root)
            if not has_checkpoint(self.root):
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
        """For a scratch directory of ours: remove it altogether, unless its run's checkpoint names it."""
        try:
            if self._run is None or not _names(self._run, self.root):
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
        sync(path.parent)
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
    for file in [*root.glob(f"*{_NEW}*"), *(root / f"{name}.part" for name in (_WEIGHTS, CHECKPOINT, PREVIOUS))]:
        freed += _removed(file)
    for file in _scratch_files(root):
        freed += _removed(file)
    for name in _FOLDERS:
        with contextlib.suppress(OSError):  # not there, or somebody's files are in it
            (root / name).rmdir()
    return freed


def _scratch_files(root: Path) -> list[Path]:
    return [file for name in _FOLDERS for pattern in SCRATCH for file in (root / name).glob(pattern)]


def _removed(file: Path) -> int:
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        return 0
    file.unlink()
    return size


def _remove_empty(root: Path) -> None:
    """Remove a directory of ours that holds nothing but the marker and the lock."""
    if {path.name for path in root.iterdir()} <= {MARKER, _LOCK}:
        for name in (MARKER, _LOCK):
            (root / name).unlink(missing_ok=True)
        root.rmdir()


def latest(root: Path, name: str) -> Path:
    """Where the run in `root` wrote its result `name`: while it replaces an earlier run's, beside that one."""
    new = root / (name + _NEW)
    return new if new.exists() else root / name


def is_begun_anew(root: Path) -> bool:
    """Whether a run was to replace the results in `root`, and was killed before it did."""
    return any(root.glob("*" + _NEW))


def has_checkpoint(root: Path) -> bool:
    return any((root / name).exists() for name in (CHECKPOINT, PREVIOUS))


def forget_checkpoint(root: Path) -> None:
    """Remove the checkpoints of a run whose lock we hold, and the scratch directories that they named."""
    scratches = _scratch_of(root)
    for name in (PREVIOUS, CHECKPOINT):  # the manifests first: none ever names a file that is gone
        (root / name).unlink(missing_ok=True)
    for scratch in scratches:
        if scratch != root.resolve() and _run_of(scratch) == root.resolve():
            with contextlib.suppress(OSError, DirectoryUnusable):  # in use, or not ours to clean
                lock = _locked(scratch / _LOCK)
                try:
                    clear_scratch(scratch)
                    _remove_empty(scratch)
                finally:
                    os.close(lock)


def _scratch_of(root: Path) -> set[Path]:
    """The directories of homes and rows that the checkpoints in `root` name, as far as they can be read."""
    found = set()
    for name in (CHECKPOINT, PREVIOUS):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found.add((root / json.loads((root / name).read_text())["checkpoint"]["scratch"]).resolve())
    return found


def _run_of(scratch: Path) -> Path | None:
    """The run whose scratch directory this is, by its marker."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Path(json.loads((scratch / MARKER).read_text())["run"])
    return None


def _names(run: Path, scratch: Path) -> bool:
    """Whether a checkpoint of `run` needs `scratch`; one that cannot be read might."""
    named = _scratch_of(run)
    return has_checkpoint(run) and (scratch.resolve() in named or not named)


def _resumable(root: Path) -> Path | None:
    """The run that can go on from what lies in `root`, its own directory or its scratch directory."""
    if has_checkpoint(root):
        return root.resolve()
    run = _run_of(root)
    return run if run is not None and _names(run, root) else None


def _idle(parent: Path) -> Iterator[Path]:
    """Directories of ours under `parent` that no live run holds; each is locked while it is looked at."""
    for marker in sorted(parent.glob(f"*/{MARKER}")):
        try:
            lock = _locked(marker.parent / _LOCK)
        except (OSError, DirectoryUnusable):
            continue
        try:
            yield marker.parent
        finally:
            os.close(lock)


def clear_leftovers(parent: Path) -> tuple[int, int]:
    """Clean what killed runs beside ours left: (directories, bytes). Live runs and those with a checkpoint keep all."""
    found = freed = 0
    for root in _idle(parent):
        if _resumable(root) is not None:
            continue
        size = 0
        with contextlib.suppress(OSError):  # another user's, perhaps: not ours to clean
            size = clear_scratch(root)
            if root.name.startswith(SCRATCH_PREFIX):
                _remove_empty(root)
        found, freed = found + bool(size), freed + size
    for probe in parent.glob(f"{PROBE}*"):
        with contextlib.suppress(OSError):
            if time.time() - probe.stat().st_mtime > _PROBE_SECONDS:
                freed += _removed(probe)
    return found, freed


def resumable(parent: Path) -> tuple[int, int]:
    """Runs with homes or rows under `parent` that ended early and can be resumed: (runs, bytes that they hold)."""
    runs, held = set(), 0
    for root in _idle(parent):
        run = _resumable(root)
        if run is not None:
            runs.add(run)
            with contextlib.suppress(OSError):
                held += sum(file.stat().st_size for file in _scratch_files(root))
    return len(runs), held


def new_name(method: str) -> str:
    """A name that no other run has, in this process or another."""
    number = next(_numbers)
    return time.strftime("%Y%m%d-%H%M%S") + f"-{method}-{os.getpid()}" + (f"-{number}" if number else "")


def _must_be_ours(root: Path) -> None:
    if not root.is_dir():
        raise OptionError(f"--output-dir: {root} is a file, not a directory.")
    # Empty, or a run that begins this very moment, or was killed as it began.
    if all(path.name in (_LOCK, f"{MARKER}.part") for path in root.iterdir()):
        return
    if not (root / MARKER).exists():
        raise OptionError(f"--output-dir: {root} holds files that seqpart did not make. Give a new or empty directory.")


def _must_be_free(root: Path) -> None:
    if has_checkpoint(root):
        raise OptionError(
            f"--output-dir: {root} holds a run that was interrupted. Give --resume {root} to go on with it, "
            "or --overwrite to start anew."
        )
    if (root / _WEIGHTS).exists():
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
