"""One home: where its bytes are, and which versions of it lie on the disk."""

from dataclasses import dataclass, field

import torch

from seqpart.store.layout import Layout
from seqpart.store.tensor_file import Version


@dataclass(slots=True)
class Traffic:
    """Bytes of tensors read from and written to the disk; headers are not counted."""

    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(slots=True)
class Home:
    layout: Layout
    host: torch.Tensor | None
    """The bytes, when the home is in host memory; owned by the host pool."""
    now: Version | None = None
    """The file with the bytes; of a home in host memory, the copy that was persisted of what it holds now."""
    marked: Version | None = None
    """What `now` was at the mark before the last put."""
    epoch: int = -1
    """How many marks there were before the last put."""
    files: set[str] = field(default_factory=set)
    """All versions on the disk, needed and spare."""


def named(version: Version | None) -> set[str]:
    return set() if version is None else {version.path.name}
