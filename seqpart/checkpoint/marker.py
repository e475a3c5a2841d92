"""Ownership of a directory: a marker says that seqpart made it, where, and for which run; a lock says that a run is alive.

A directory that was copied or moved has the marker of another place, and one that took another's place has another
`id`: it is then not known which run it belongs to.
"""

import errno
import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import Literal

import msgspec

from seqpart.errors import CorruptFile, DirectoryUnusable
from seqpart.files import PRIVATE, Folder, remove
from seqpart.schema import Digest, Whole, as_type
from seqpart.store.atomic import checked_body, unusable, with_checksum, write_text
from seqpart.store.direct import explaining, sync
from seqpart.store.scratch import NEW, PUBLISHING
from seqpart.text import parsed

MARKER = "seqpart-run.json"
LOCK = "seqpart.lock"
_WAIT = 1.0
"""Seconds to wait for a lock: other starting runs check it, and clean up, in less."""


class Marker(msgspec.Struct, kw_only=True, frozen=True, rename={"made_by": "made by", "run_id": "run id"}):
    made_by: Literal["seqpart"] = "seqpart"
    state: str
    """State of the run, as it was written last."""
    pid: Whole
    time: str
    directory: Path
    """The path where it was written, without links."""
    id: Digest
    """Identity of the run directory, as long as it stays in its place."""
    run: Path | None = None
    """The directory of the run that these homes and rows belong to; None if this is the run's own directory."""
    run_id: Digest | None = None

    def write(self, state: str) -> None:
        now = msgspec.structs.replace(self, state=state, pid=os.getpid(), time=time.strftime("%Y-%m-%d %H:%M:%S"))
        write_text(self.directory / MARKER, json.dumps(msgspec.to_builtins(now, enc_hook=str)) + "\n")


def marker_of(folder: Folder) -> Marker | None:
    """Reads a directory's marker; None if it has none. Raises ValueError if the file is no marker that seqpart wrote."""
    if not folder.holds(MARKER):
        return None
    try:
        text, found = folder.read(MARKER)
        marker = as_type(Marker, parsed(text))
    except OSError as error:
        raise ValueError(f"its marker cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"its marker is damaged, or not one that seqpart wrote: {error}") from None
    if found.st_uid != folder.uid:
        raise ValueError("its marker belongs to another user")
    return marker


def locked(root: Path, *, wait: float = _WAIT) -> int:
    """Takes the lock of `root`. Returns a descriptor that frees it when it is closed, or when the process is killed.

    Raises DirectoryUnusable if another run holds it for longer than `wait` seconds, OSError if it cannot be opened.
    """
    until = time.monotonic() + wait
    while True:
        handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, PRIVATE)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.lstat(root / LOCK)):
                return handle
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(handle)
                raise _in_use(root) from None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # in use, or the directory was cleaned up at this very moment
        time.sleep(0.02)


def lives(folder: Folder) -> bool:
    """True if a run holds the lock. The check itself takes a shared lock, only for a moment."""
    try:
        handle = folder.open(LOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # it is not known
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def refuse_in_use(folder: Folder) -> None:
    """Raises DirectoryUnusable if another run holds the lock for longer than the check of a starting run takes."""
    until = time.monotonic() + _WAIT
    while lives(folder):
        if time.monotonic() >= until:
            raise _in_use(folder.path)
        time.sleep(0.02)


def _in_use(root: Path) -> DirectoryUnusable:
    return DirectoryUnusable(f"{root} is in use by another run. Wait for it to end, or give another --output-dir.")


def is_half_written_marker(name: str) -> bool:
    return re.fullmatch(rf"{re.escape(MARKER)}(\.seqpart-[0-9a-f]{{8}})?\.part", name) is not None


_RESULT = re.compile(r"\w[\w.-]*")


def latest(root: Path, name: str) -> Path:
    """Returns the path of the run's latest result `name`: beside an earlier run's, until it replaces that one."""
    new = root / (name + NEW)
    return new if new.exists() else root / name


def is_begun_anew(root: Path) -> bool:
    """True if a run was to replace the results in `root`, and was killed before it did."""
    return any(root.glob("*" + NEW))


def publish(root: Path) -> None:
    """Replaces the earlier results by the new ones. Raises StoreError."""
    with explaining(root, unusable):
        with Folder.at(root) as folder:
            new = [name for name in folder.names() if name.endswith(NEW)]
        for name in new:
            sync(root / name)
        if new:
            write_text(root / PUBLISHING, with_checksum("results", [name.removesuffix(NEW) for name in new]))
            finish_publishing(root)


def finish_publishing(root: Path) -> None:
    """Completes `publish` after a run was killed in it. The caller holds the lock of `root`.

    Raises CorruptFile if the list of results is damaged, OSError if they cannot be moved.
    """
    try:
        with Folder.at(root) as folder:
            names = checked_body("results", folder.read(PUBLISHING)[0])
        if not all(isinstance(name, str) and _RESULT.fullmatch(name) for name in names):
            raise ValueError
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ELOOP, errno.EISDIR, errno.ESPIPE):
            raise
        raise CorruptFile(
            f"{root / PUBLISHING} is damaged: its run was killed while it replaced earlier results, and it is not known which. "
            f"Look at the files in {root} that end in {NEW}, then remove it.", root / PUBLISHING,
        ) from None  # fmt: skip
    for name in names:
        if (root / (name + NEW)).exists():
            (root / (name + NEW)).replace(root / name)
    sync(root)
    remove(root / PUBLISHING)
