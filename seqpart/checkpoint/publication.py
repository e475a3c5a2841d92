"""Results that take the place of an earlier run's: all of them, or none yet.

1. every result is written beside the earlier one, under a name that ends in `.seqpart-new`   the earlier ones hold
2. the list of them is written and synced: from here on they are published
3. each takes its place                                       who starts next in the directory goes on with this
4. the list is removed
"""

import errno
import re
from pathlib import Path

from seqpart.errors import CorruptFile
from seqpart.files import Folder, remove
from seqpart.store.atomic import unusable, write_text
from seqpart.store.checksummed import checked_body, with_checksum
from seqpart.store.direct import sync
from seqpart.store.scratch import NEW, PUBLISHING

_RESULT = re.compile(r"\w[\w.-]*")


def latest(root: Path, name: str) -> Path:
    """Where the run in `root` wrote its result `name`: while it replaces an earlier run's, beside that one."""
    new = root / (name + NEW)
    return new if new.exists() else root / name


def is_begun_anew(root: Path) -> bool:
    """Whether a run was to replace the results in `root`, and was killed before it did."""
    return any(root.glob("*" + NEW))


def publish(root: Path) -> None:
    """Let the new results take the place of the earlier ones. Raises StoreError."""
    try:
        with Folder.at(root) as folder:
            new = [name for name in folder.names() if name.endswith(NEW)]
        for name in new:
            sync(root / name)
        if new:
            write_text(root / PUBLISHING, with_checksum("results", [name.removesuffix(NEW) for name in new]))
            finish_publishing(root)
    except OSError as error:
        raise unusable(error, root) from None


def finish_publishing(root: Path) -> None:
    """Go on where a killed run was letting its results take their places. The caller holds the lock of `root`.

    Raises CorruptFile where the list of them is damaged, OSError where they cannot be moved.
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
            f"{root / PUBLISHING} is damaged: its run was killed while results took their places, and which is not known. "
            f"Look at the files in {root} that end in {NEW}, then remove it.", root / PUBLISHING,
        ) from None  # fmt: skip
    for name in names:
        if (root / (name + NEW)).exists():
            (root / (name + NEW)).replace(root / name)
    sync(root)
    remove(root / PUBLISHING)
