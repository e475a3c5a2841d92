"""Where the homes and rows of a run go: its own directory, a new one under --offload-dir, or the one of its checkpoint."""

import os
import secrets
from pathlib import Path

from seqpart.checkpoint.leftovers import SCRATCH_PREFIX, belongs_to
from seqpart.checkpoint.manifest import Manifest, bring
from seqpart.checkpoint.marker import LOCK, locked
from seqpart.checkpoint.run_directory import RunDirectory


def open_scratch(directory: RunDirectory, manifest: Manifest | None, offload_dir: Path | None, name: str) -> RunDirectory:
    """The directory of the run's homes and rows: `directory` itself, or another that is to `vanish` when the run ends.

    What a checkpoint needs is used in its place only where that was made for this very run. A run that was copied or moved,
    or whose checkpoint names what is not its own, gets a directory of its own with the same files, and nothing is changed
    there: whose they are is not known.

    Raises DirectoryUnusable where another run is there, CorruptFile where files of the checkpoint are missing.
    """
    found = manifest.scratch if manifest is not None else None
    new = f"{SCRATCH_PREFIX}{name}-{secrets.token_hex(4)}"
    if found is None:
        return RunDirectory(offload_dir / new, run=directory) if offload_dir is not None else directory
    if found.resolve() == directory.marker.directory:
        return directory
    if belongs_to(found, directory.marker) or not found.exists():
        return RunDirectory(found, run=directory, resume=True)
    lock = locked(found) if os.path.lexists(found / LOCK) else None
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
