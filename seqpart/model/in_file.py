"""Parameters that lie in a file from the beginning, for a model that is initialized and does not fit into memory."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from seqpart.device.pages import round_up
from seqpart.store.direct import explaining

_SMALLEST = 1 << 20
"""Parameters of fewer bytes stay in memory: each of the others has a mapping of its own."""
_MAPPED = WeakTensorKeyDictionary()
"""{parameter: (the mapping, its bytes as a tensor)}."""


@contextmanager
def parameters_in_file(folder: str | Path) -> Iterator[None]:
    """A context in which new modules have their parameters in a file in `folder`, which is mapped into memory. They are
    initialized there as always, to the same values, and the kernel may take their pages back at any time.

    The file has no name and is gone with the last of them. Parameters under 1 MiB stay in memory, and those that are no plain
    ones on the CPU. Raises StoreError where the folder cannot be written, or the disk is full.
    """
    register, size, found = nn.Module.register_parameter, 0, list[mmap.mmap]()
    with ExitStack() as stack:
        with explaining(Path(folder)):
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))

        def in_file(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            nonlocal size
            if parameter is not None and _may_move(parameter):
                with explaining(Path(folder)):
                    found.append(_moved(parameter, file.fileno(), size))
                size += len(found[-1])
            register(self, name, parameter)

        with patch.object(nn.Module, "register_parameter", in_file):
            yield
    for mapping in found:
        mapping.madvise(mmap.MADV_DONTNEED)


def _may_move(parameter: nn.Parameter) -> bool:
    plain = type(parameter) is nn.Parameter and parameter.device.type == "cpu" and parameter.is_contiguous()
    return plain and parameter.nbytes >= _SMALLEST and not is_in_file(parameter)


def _moved(parameter: nn.Parameter, file: int, offset: int) -> mmap.mmap:
    """Moves a parameter's values to the end of the file. Raises OSError where the disk is full: the mapping would end the
    process."""
    nbytes = round_up(parameter.nbytes)
    os.posix_fallocate(file, offset, nbytes)
    mapping = mmap.mmap(file, nbytes, offset=offset)
    flat = torch.frombuffer(mapping, dtype=torch.uint8)
    place = flat[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)
    parameter.data = place.copy_(parameter.detach())
    _MAPPED[parameter] = mapping, flat
    return mapping


def is_in_file(parameter: torch.Tensor) -> bool:
    """True if the parameter's values lie in a file."""
    if parameter not in _MAPPED:
        return False
    return bool(_MAPPED[parameter][1].untyped_storage()._cdata == parameter.untyped_storage()._cdata)


def let_pages_go(parameter: torch.Tensor) -> None:
    """Gives the pages of a parameter that lies in a file back to the kernel; its values stay there."""
    _MAPPED[parameter][0].madvise(mmap.MADV_DONTNEED)
