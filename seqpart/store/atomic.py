"""Small files that are replaced whole or not at all, and JSON with a checksum before it."""

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import xxhash

from seqpart.errors import DirectoryUnusable, DiskFull, StoreError, shown
from seqpart.files import aside, is_device, made, write_all
from seqpart.store.direct import explained, sync
from seqpart.text import parsed


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Replaces a small file atomically and durably. mode: permissions, before the user's umask."""
    if path.is_dir():
        raise DirectoryUnusable(f"cannot make {path}: it is a directory. Give a path in a directory that you may write to.")
    part = aside(path)
    try:
        if is_device(path):
            path.write_text(text)
            return
        write_synced(part, text, mode)
        part.replace(path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise unusable(error, path) from None


def write_synced(path: Path, text: str, mode: int = 0o666) -> None:
    """Writes a new file in place of `path`, on the disk when this returns. Raises OSError."""
    handle = made(path, mode)
    try:
        write_all(handle, text.encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def unusable(error: OSError, path: Path) -> StoreError:
    """Like `explained`, for a file that is being made: it was not there before, and no option moves it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        full = f"the disk is full: could not write {shown(path)}"
        return DiskFull(f"{full}. Free some space, or give another path. Earlier files stay.")
    if error.errno in (errno.ENOENT, errno.EEXIST):
        return DirectoryUnusable(
            f"cannot make {shown(path)}: {error.strerror}. Give a path in a directory that you may write to."
        )
    return explained(error, path)


def with_checksum(kind: str, body: object) -> str:
    text = json.dumps(body)
    return f'{{"xxh3_64": "{xxhash.xxh3_64_hexdigest(text.encode())}",\n"{kind}": {text}}}\n'


def checked_body(kind: str, text: str) -> Any:
    """Returns the body of a text that `with_checksum` made. Raises ValueError for any other."""
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
        body = parsed(text)[kind]
        if text == with_checksum(kind, body):
            return body
    raise ValueError("its checksum is not the one that was written")
