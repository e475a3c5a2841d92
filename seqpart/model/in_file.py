"""Parameters that lie in a file from the beginning, for a model that is initialized and does not fit into memory."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from seqpart.device.pages import round_up
from seqpart.store.direct import explaining

_SMALLEST, _SEGMENT = 1 << 20, 256 << 20
"""Parameters of fewer bytes stay in memory; the others share mappings of so many, each of which needs a file descriptor."""
_MAPPED = WeakTensorKeyDictionary()
"""{parameter: (the mapping, where it begins there, its bytes as a tensor)}."""


class _File:
    """A file without a name in `folder`, mapped as parameters come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with explaining(folder):
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed by `parameters_in_file`)
        self.mappings = list[mmap.mmap]()
        self._size = self._used = 0

    def take(self, parameter: nn.Parameter) -> None:
        """Moves a parameter's values into the file. Raises StoreError on a full disk, where a mapping would end the process."""
        nbytes = round_up(parameter.nbytes)
        if not self.mappings or self._used + nbytes > len(self.mappings[-1]):
            segment = max(_SEGMENT, nbytes)
            with explaining(self._folder):
                os.posix_fallocate(self.file.fileno(), self._size, segment)
                self.mappings.append(mmap.mmap(self.file.fileno(), segment, offset=self._size))
            self._size, self._used = self._size + segment, 0
        mapping, start = self.mappings[-1], self._used
        self._used += nbytes
        flat = torch.frombuffer(mapping, dtype=torch.uint8, count=parameter.nbytes, offset=start)
        parameter.data = flat.view(parameter.dtype).view(parameter.shape).copy_(parameter.detach())
        _MAPPED[parameter] = mapping, start, flat


_open: list[_File] = []
_register: Any = nn.Module.register_parameter


def _in_file(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if _open and parameter is not None and _may_move(parameter):
        _open[-1].take(parameter)
    _register(self, name, parameter)


@contextmanager
def parameters_in_file(folder: str | Path) -> Iterator[None]:
    """A context in which new modules have their parameters in a file in `folder`, which is mapped into memory. They are
    initialized there as always, to the same values, and the kernel may take their pages back at any time.

    The file has no name and is gone with the last of them. Parameters under 1 MiB stay in memory, and those that are no plain
    ones on the CPU, or share their memory with another tensor. Raises StoreError where the folder cannot be written, or the
    disk is full.
    """
    global _register
    opened, modules = _File(Path(folder)), cast(Any, nn.Module)
    if not _open:
        _register, modules.register_parameter = nn.Module.register_parameter, _in_file
    _open.append(opened)
    try:
        with opened.file:
            yield
    finally:
        _open.remove(opened)  # another may have been opened since, by another thread
        if not _open:
            modules.register_parameter = _register
    for mapping in opened.mappings:
        mapping.madvise(mmap.MADV_DONTNEED)


def _may_move(parameter: nn.Parameter) -> bool:
    plain = type(parameter) is nn.Parameter and parameter.device.type == "cpu" and parameter.layout is torch.strided
    plain = plain and not parameter.is_quantized and parameter.is_contiguous() and parameter.nbytes >= _SMALLEST
    return plain and not is_in_file(parameter) and _holders(parameter) == _alone()


def _holders(tensor: torch.Tensor) -> int:
    """Returns how many hold the tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


@cache
def _alone() -> int:
    return _holders(nn.Parameter(torch.empty(1)))


def is_in_file(parameter: torch.Tensor) -> bool:
    if parameter not in _MAPPED:
        return False
    return bool(_MAPPED[parameter][2].untyped_storage()._cdata == parameter.untyped_storage()._cdata)


def let_pages_go(parameter: torch.Tensor) -> None:
    """Gives the pages of a parameter, if it lies in a file, back to the kernel; its values stay there."""
    if parameter in _MAPPED:
        mapping, start, flat = _MAPPED[parameter]
        mapping.madvise(mmap.MADV_DONTNEED, start, round_up(len(flat)))
