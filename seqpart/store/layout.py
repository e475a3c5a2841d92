"""Layouts of named tensors in one flat buffer, and the safetensors headers that describe them.

A block's home is one file: a header padded with spaces to a whole page, then the tensors one after the other. The
buffer on the device has the same bytes in the same order, so loading is one read and saving is one write, and any
safetensors reader can open the file. Every tensor is aligned as torch's own are, since kernels round differently for other
alignments: a filler may stand before it, which has a name of its own in the file.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
import torch

from seqpart.device.pages import PAGE, lies_dense, round_up
from seqpart.errors import CorruptFile, ModelError
from seqpart.schema import Whole, as_type, word_of
from seqpart.text import parsed

CODES = {
    torch.complex64: "C64", torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}

LINE = 64
"""Alignment in bytes of torch's own tensors on the CPU."""
ALIGNMENT = 256
"""Alignment in bytes of weights and graphs. torch's own tensors begin at multiples of 512 on a GPU, where cuBLASLt chooses
kernels by alignments up to 256 (aten/src/ATen/cuda/CUDABlas.cpp, `_getAlignment`)."""
_FILLER = "seqpart.filler."


class _Entry(msgspec.Struct):
    dtype: Annotated[str, word_of(*DTYPES)]
    shape: list[Whole]
    data_offsets: tuple[Whole, Whole]


LARGEST_HEADER = 64 << 20
_STRIDES = "seqpart.strides"
"""Metadata key in a home's header: JSON of shape and strides by name, for tensors that do not lie row by row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    """Bytes from the start of the data."""
    stride: tuple[int, ...] | None = None
    """Strides of a tensor that does not lie row by row, as with `channels_last`; None: row by row."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that lies in `flat`, the bytes of a home."""
        own = flat[self.offset : self.offset + self.nbytes].view(self.dtype)
        return own.view(self.shape) if self.stride is None else own.as_strided(self.shape, self.stride)

    def empty(self) -> torch.Tensor:
        """Returns a new tensor of this kind on the CPU, with any values."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")


@dataclass(frozen=True)
class Layout:
    """Tensors one after the other, widest elements first, each aligned. Scalars, such as step counts, follow the others
    of their type without gaps: otherwise each would take a line of its own."""

    specs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec], alignment: int = LINE) -> Self:
        placed, offset = [], 0
        for spec in sorted(tensors, key=lambda spec: (-spec.dtype.itemsize, not spec.shape)):
            if spec.dtype not in CODES:
                raise ModelError(
                    f"tensor {spec.name!r} has type {spec.dtype}, which cannot be stored. Use a plain float or int type."
                )
            placed.append(replace(spec, offset=round_up(offset, alignment) if spec.shape and spec.nbytes else offset))
            offset = placed[-1].offset + spec.nbytes
        return cls(tuple(placed))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, with the gaps between them. Cached: planning reads it for every candidate partition."""
        return max((spec.offset + spec.nbytes for spec in self.specs), default=0)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of the gaps between tensors."""
        ends = [0, *(spec.offset + spec.nbytes for spec in self.specs)]
        starts = [spec.offset for spec in self.specs]
        return tuple((end, start - end) for end, start in zip(ends, starts, strict=False) if start > end)

    @property
    def padded_nbytes(self) -> int:
        """Bytes of a buffer of whole pages for this layout."""
        return round_up(self.nbytes)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each tensor as a view of `flat`, (>= nbytes,) uint8. The views keep `flat`'s memory alive."""
        return {spec.name: spec.view(flat) for spec in self.specs}


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, stride=stride_of(tensor))


def stride_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of a tensor; None if it lies row by row, or with gaps, which no home keeps."""
    rows = tuple(prod(tensor.shape[axis + 1 :]) for axis in range(tensor.ndim))
    return None if tensor.stride() == rows or not lies_dense(tensor) else tuple(tensor.stride())


def encode_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Returns the file's first bytes: length, JSON, spaces up to a whole page."""
    specs = list(specs)
    strides = {spec.name: [spec.shape, spec.stride] for spec in specs if spec.stride is not None}
    more = {_STRIDES: json.dumps(strides, separators=(",", ":"))} if strides else {}
    entries: dict[str, object] = {"__metadata__": {**metadata, **more}}
    entries |= _fillers(Layout(tuple(specs)))
    for spec in specs:
        place = [spec.offset, spec.offset + spec.nbytes]
        entries[spec.name] = {"dtype": CODES[spec.dtype], "shape": _as_it_lies(spec), "data_offsets": place}
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = round_up(8 + len(text)) - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def _fillers(layout: Layout) -> dict[str, object]:
    """Header entries for the gaps between tensors: readers of safetensors refuse a file with gaps."""
    return {
        f"{_FILLER}{offset}": {"dtype": "U8", "shape": [nbytes], "data_offsets": [offset, offset + nbytes]}
        for offset, nbytes in layout.gaps
    }


def _as_it_lies(spec: TensorSpec) -> list[int]:
    """Shape that fits the bytes for other readers, which know no strides: the longest stride first."""
    if spec.stride is None:
        return list(spec.shape)
    axes = sorted(range(len(spec.shape)), key=lambda axis: -(spec.stride or ())[axis])
    return [spec.shape[axis] for axis in axes]


def decode_header(head: bytes, path: Path) -> tuple[Layout, dict[str, str]]:
    """Returns layout and metadata from a file's first bytes. Raises CorruptFile, naming `path`."""
    length = header_size(head, path)
    return decode_entries(head[8:length] if len(head) >= length else b"", path)


def decode_entries(text: bytes, path: Path) -> tuple[Layout, dict[str, str]]:
    """Returns layout and metadata from the JSON of a header, whoever wrote it. Raises CorruptFile, naming `path`."""
    try:
        found = as_type(dict[str, Any], parsed(text))
        metadata = as_type(dict[str, str], found.pop("__metadata__", {}))
        strides = as_type(dict[str, tuple[list[Whole], list[Whole]]], parsed(metadata.pop(_STRIDES, "{}")))
        specs = []
        entries = as_type(dict[str, _Entry], found)
        fillers = {name: entries.pop(name) for name in [*entries] if name.startswith(_FILLER)}
        for name, entry in entries.items():
            shape, stride = strides.pop(name, (entry.shape, None))
            own = tuple(stride) if stride is not None else None
            start, stop = entry.data_offsets
            spec = TensorSpec(name=name, shape=tuple(shape), dtype=DTYPES[entry.dtype], offset=start, stride=own)
            ends = stop == start + spec.nbytes
            if not ends or (own is not None and (len(own) != len(shape) or _as_it_lies(spec) != entry.shape)):
                raise ValueError(f"{name}: its offsets and shape disagree")
            specs.append(spec)
        if strides:
            raise ValueError(f"{_STRIDES}: names tensors that are not in the file")
        layout = Layout(tuple(sorted(specs, key=lambda spec: spec.offset)))
        if fillers and fillers != {name: as_type(_Entry, entry) for name, entry in _fillers(layout).items()}:
            raise ValueError("its entries for the gaps between tensors do not match the gaps")
    except ValueError as error:
        raise CorruptFile(
            f"{path}: the safetensors header is damaged ({error}). Do not train on it; use another copy.", path
        ) from None
    return layout, metadata


def header_size(head: bytes, path: Path) -> int:
    """Bytes before the data, from the first 8 bytes of a file that we wrote. Raises CorruptFile, naming `path`."""
    length = 8 + int.from_bytes(head[:8], "little")
    if len(head) < 8 or length % PAGE or not PAGE <= length <= LARGEST_HEADER:
        raise CorruptFile(
            f"{path} is not a file that seqpart wrote whole (its header length is {length}). It was not used.", path
        )
    return length
