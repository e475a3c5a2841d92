"""The directory of a run, or of its homes and rows: created or taken over, locked, and cleaned up when the run ends.

`leftovers` handles what lies beside it. A directory that was moved away while its run was alive is left as it is.
"""

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import seqpart.checkpoint.marker as markers
from seqpart.checkpoint.leftovers import IGNORE, SCRATCH_PREFIX, Kind, belongs_to, classified, clean, remove_empty
from seqpart.checkpoint.manifest import Manifest, bring
from seqpart.checkpoint.marker import LOCK, MARKER, Marker
from seqpart.errors import BadInput, CorruptFile, DirectoryUnusable, Interrupted, OptionError, StoreError, resuming
from seqpart.files import PRIVATE_FOLDER, Folder, folder_inside
from seqpart.store.atomic import unusable, write_text
from seqpart.store.direct import explained, explaining
from seqpart.store.scratch import (
    CHECKPOINT,
    FOLDERS,
    NEW,
    PREVIOUS,
    PUBLISHING,
    WEIGHTS,
    clear_scratch,
    has_checkpoint,
    named_scratch,
    remove_half_written,
)

_numbers = itertools.count()
_NOTHING_KEPT = "nothing was saved; the run's scratch files are removed, and earlier results are untouched."


class RunDirectory:
    """`root` with its lock held, the scratch folders (homes of blocks and boundary rows), and the results beside them.

    `overwrite` deletes an earlier run's checkpoint, and its results once there are new ones; `resume` opens the
    directory of a run that has a checkpoint, and keeps everything. `run` is given for a scratch directory: the directory of
    its run; it is then new, and other users cannot open it. The path is made absolute and free of links at the beginning:
    changing the working directory, or a link's target, changes nothing for the run.

    Raises DirectoryUnusable if it cannot be written or another run holds it, OptionError if it holds files that seqpart did
    not make, a finished run without `overwrite`, or one that could be resumed.
    """

    def __init__(
        self, root: Path, *, overwrite: bool = False, resume: bool = False, run: "RunDirectory | None" = None
    ) -> None:  # fmt: skip
        self._run = run
        if resume and not root.exists():
            raise CorruptFile(f"{root} is missing: the checkpoint in {run.root if run is not None else root} needs it.", root)
        with explaining(root, unusable):
            self._made = created = _created(root, private=run is not None)
            if not created and run is not None and not resume:
                raise DirectoryUnusable(f"{root} exists already, and was not made by this run. Give another --offload-dir.")
            self.root: Path = root.resolve()
            self._folder = Folder.at(self.root)
        try:
            with explaining(root / LOCK, unusable):
                if not created and not resume:
                    _must_be_ours(self._folder)
                self._lock = markers.locked(self.root)
        except BaseException:
            self._folder.__exit__()
            raise
        try:
            with explaining(root, unusable):
                self._take_over(overwrite, resume)
        except BaseException:
            self._let_go()
            raise

    def _take_over(self, overwrite: bool, resume: bool) -> None:
        is_new = set(self._folder.names()) <= {LOCK}
        markers.finish_publishing(self.root)
        self.marker = self._identity()
        if overwrite and not resume:
            self._forget_checkpoint()
        elif not resume:
            _must_be_free(self.root)
        self.cleaned = remove_half_written(self._folder) + (0 if resume else clear_scratch(self._folder))
        self._replaces = (self.root / WEIGHTS).exists()
        self.marker.write("running")
        if is_new:
            write_text(self.root / IGNORE, "*\n")
        for name in FOLDERS:
            _make_own_folder(self._folder, name)

    def _identity(self) -> Marker:
        """Returns the directory's marker, with its former id if it is still in its place."""
        here, found = self.root, None
        with contextlib.suppress(ValueError):
            found = markers.marker_of(self._folder)
        known = found.id if found is not None and found.directory == here else secrets.token_hex(8)
        run, run_id = (None, None) if self._run is None else (self._run.marker.directory, self._run.marker.id)
        return Marker(state="", pid=os.getpid(), time="", directory=here, id=known, run=run, run_id=run_id)

    @property
    def homes(self) -> Path:
        return self.root / "homes"

    @property
    def rows(self) -> Path:
        return self.root / "rows"

    def result(self, name: str) -> Path:
        """Returns the path for the result `name`: beside that of an earlier run, which stays until `publish`."""
        return self.root / (name + NEW if self._replaces else name)

    def publish(self) -> None:
        """Replaces the earlier results by the run's, when it is done."""
        markers.publish(self.root)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A context in which a signal that was not held back ends the run, and leaves its last checkpoint."""
        try:
            yield
        except Interrupted:
            raise
        except KeyboardInterrupt as interrupt:
            if has_checkpoint(self._folder):
                raise Interrupted(self.root) from None
            raise KeyboardInterrupt(str(interrupt) or _NOTHING_KEPT) from None

    @contextlib.contextmanager
    def resumable(
        self, add_note: Callable[[Exception, str], None], noted: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Adds a note on how to go on to an error that ends the run, by `add_note`, unless that was `noted` already."""
        try:
            yield
        except Exception as error:
            if isinstance(error, CorruptFile) and has_checkpoint(self._folder):
                add_note(
                    error, f"There is a checkpoint: {resuming(self.root)} goes on, or says that it needs the damaged file."
                )
            elif not isinstance(error, BadInput) and has_checkpoint(self._folder) and not noted():
                add_note(error, f"The last checkpoint is intact: when the cause is gone, go on with {resuming(self.root)}")
            raise

    def close(self, state: str, drop: Collection[str] = ()) -> None:
        """Writes how the run ended and frees the lock. What a checkpoint needs stays, unless the run is "done".

        drop: names of files to remove if the run failed before it began, with the directory if the run created it.
        """
        with self._ending(raises=state == "done"):
            if not self._folder.is_at(self.marker.directory):
                return
            if state == "done":
                self._forget_checkpoint()
            clear_scratch(self._folder)
            self.marker.write(state)
            if drop and self._made:
                for name in drop:
                    self._folder.remove(name)
                remove_empty(self._folder)

    def vanish(self, *, failed: bool = False) -> None:
        """Removes a scratch directory, unless its run's checkpoint needs it, or may need it.

        failed: true if the run raises an error of its own; otherwise raises StoreError if the disk fails.
        """
        with self._ending(raises=not failed):
            found = classified(self._folder, is_locked=True) if self._folder.is_at(self.marker.directory) else None
            if found is not None and found.kind is Kind.LEFTOVER:
                clear_scratch(self._folder)
                remove_empty(self._folder)

    @contextlib.contextmanager
    def _ending(self, *, raises: bool) -> Iterator[None]:
        """A context after which the directory is let go. raises: if the disk fails; else the next run cleans up, since this one
        raises an error of its own."""
        try:
            yield
        except (OSError, StoreError) as error:
            if raises:
                raise _left_over(error, self.root) from None
        finally:
            self._let_go()

    def _let_go(self) -> None:
        os.close(self._lock)
        self._folder.__exit__()

    def _forget_checkpoint(self) -> None:
        """Removes the checkpoints, and those scratch directories they named that are this run's."""
        scratches, _ = named_scratch(self._folder)
        for name in (PREVIOUS, CHECKPOINT):  # the manifests first: none may name a file that is gone
            self._folder.unlink(name)
        for scratch in scratches:
            if belongs_to(scratch, self.marker):
                with contextlib.suppress(StoreError, FileNotFoundError, NotADirectoryError):  # in use, or gone
                    clean(scratch)


def refuse_taken(root: Path, *, overwrite: bool = False, resume: bool = False) -> None:
    """Raises what a RunDirectory in `root` would, as far as a check without the lock shows, before a plan is made."""
    if not root.is_dir():
        return
    with explaining(root, unusable), Folder.at(root) as folder:
        if not resume:
            _must_be_ours(folder)
        markers.refuse_in_use(folder)
    if not (resume or overwrite):
        _must_be_free(root)


def finish_what_was_published(root: Path) -> None:
    """Completes the publishing of results in which a run was killed.

    Raises DirectoryUnusable if a run holds `root`, CorruptFile if the list of results is damaged.
    """
    if (root / PUBLISHING).exists():
        lock = markers.locked(root)
        try:
            with explaining(root, unusable):
                markers.finish_publishing(root)
        finally:
            os.close(lock)


def _left_over(error: OSError | StoreError, root: Path) -> StoreError:
    """Returns the error for a disk that failed while the homes of a finished run were removed."""
    found = error if isinstance(error, StoreError) else explained(error, root)
    found.add_note("The run is finished and its results are written. Some of its scratch files could not be removed.")
    return found


def new_name(method: str) -> str:
    """Returns a name that no other run has, in this process or another."""
    number = next(_numbers)
    return time.strftime("%Y%m%d-%H%M%S") + f"-{method}-{os.getpid()}" + (f"-{number}" if number else "")


def _created(root: Path, *, private: bool) -> bool:
    """Creates the directory. Returns False if it exists already."""
    root.parent.mkdir(parents=True, exist_ok=True)
    try:
        root.mkdir(PRIVATE_FOLDER if private else 0o777)
    except FileExistsError:
        if not root.is_dir():
            raise OptionError(f"--output-dir: {root} is a file, not a directory.") from None
        return False
    return True


def _make_own_folder(folder: Folder, name: str) -> None:
    """Creates a folder that other users cannot open. Raises DirectoryUnusable if something else has its name."""
    path = folder.path / name
    with contextlib.suppress(FileExistsError):
        path.mkdir(PRIVATE_FOLDER)
    with folder_inside(folder, name) as inside:
        if inside is None:
            raise DirectoryUnusable(
                f"{path} is a link, or a file: homes and rows go to a directory of the run's own. Remove it, or give another "
                "--output-dir."
            )
        inside.make_private()


def _must_be_ours(folder: Folder) -> None:
    # Empty, or of a run that is just beginning, or was killed as it began.
    if all(name == LOCK or markers.is_half_written_marker(name) for name in folder.names()):
        return
    try:
        found = markers.marker_of(folder)
    except ValueError as error:
        raise CorruptFile(
            f"--output-dir: {folder.path} holds files, and it is not known whether seqpart made them: {error} ({MARKER}). They "
            "were left as they are. Give a new or empty directory.", folder.path / MARKER,
        ) from None  # fmt: skip
    if found is None:
        raise OptionError(f"--output-dir: {folder.path} holds files that seqpart did not make. Give a new or empty directory.")


def _must_be_free(root: Path) -> None:
    if has_checkpoint(root):
        raise OptionError(
            f"--output-dir: {root} holds a run that was interrupted. Resume it with {resuming(root)}, or "
            "start again with --overwrite."
        )
    if (root / WEIGHTS).exists():
        raise OptionError(
            f"--output-dir: {root} holds a finished run. Give another directory, or --overwrite to replace its results."
        )


def open_scratch(directory: RunDirectory, manifest: Manifest | None, offload_dir: Path | None, name: str) -> RunDirectory:
    """Opens the directory of the run's homes and rows: `directory` itself, or another that must `vanish` when the run ends.

    A checkpoint's files are used in place only if their directory was made for this very run. A run that was copied or moved,
    or whose checkpoint names another run's files, gets a new directory with the same files, and nothing is changed in the old
    one, whose owner is not known.

    Raises DirectoryUnusable if another run is there, CorruptFile if files of the checkpoint are missing.
    """
    found = manifest.scratch if manifest is not None else None
    new = f"{SCRATCH_PREFIX}{name}-{secrets.token_hex(4)}"
    if found is None:
        return RunDirectory(offload_dir / new, run=directory) if offload_dir is not None else directory
    if found.resolve() == directory.marker.directory:
        return directory
    if belongs_to(found, directory.marker) or not found.exists():
        return RunDirectory(found, run=directory, resume=True)
    lock = markers.locked(found) if os.path.lexists(found / LOCK) else None
    try:
        scratch = RunDirectory((offload_dir or found.parent) / new, run=directory)
        try:
            assert manifest is not None
            bring(manifest, scratch.root)
        except BaseException:
            scratch.vanish()
            raise
        return scratch
    finally:
        if lock is not None:
            os.close(lock)
