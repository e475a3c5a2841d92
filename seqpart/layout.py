"""How named tensors lie in one flat buffer, and the safetensors header that says so.

A block's home is one file: a header padded with spaces to a whole page, then the tensors one after the other. The
buffer on the device has the same bytes in the same order, so loading is one read and saving is one write, and any
safetensors reader can open the file.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import torch

from seqpart.direct import PAGE, round_up
from seqpart.errors import CorruptFile, ModelError

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}

_LARGEST_HEADER = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    """Bytes from the start of the data."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors without holes, widest elements first, so that each lies at a multiple of its element size."""

    specs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec]) -> Self:
        placed, offset = [], 0
        for spec in sorted(tensors, key=lambda spec: -spec.dtype.itemsize):
            if spec.dtype not in _CODES:
                raise ModelError(
                    f"tensor {spec.name!r} has type {spec.dtype}, which has no home. Use a plain float or int type."
                )
            placed.append(TensorSpec(name=spec.name, shape=spec.shape, dtype=spec.dtype, offset=offset))
            offset += spec.nbytes
        return cls(tuple(placed))

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @property
    def room(self) -> int:
        """Bytes of a buffer that can take this layout by whole pages."""
        return round_up(self.nbytes)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each tensor as a view of `flat`, (>= nbytes,) uint8. The views keep `flat`'s memory alive."""
        return {
            spec.name: flat[spec.offset : spec.offset + spec.nbytes].view(spec.dtype).view(spec.shape) for spec in self.specs
        }


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)


def encode_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The file's first bytes: length, JSON, spaces up to a whole page."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for spec in specs:
        entries[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [spec.offset, spec.offset + spec.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = round_up(8 + len(text)) - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def decode_header(head: bytes, path: Path) -> tuple[Layout, dict[str, str]]:
    """Layout and metadata from a file's first bytes. Raises CorruptFile, naming `path`."""
    length = header_size(head, path)
    try:
        if len(head) < length:
            raise ValueError("cut off")
        entries = json.loads(head[8:length])
        metadata = {str(key): str(value) for key, value in entries.pop("__metadata__", {}).items()}
        specs = [
            TensorSpec(
                name=name,
                shape=tuple(int(n) for n in entry["shape"]),
                dtype=_DTYPES[entry["dtype"]],
                offset=int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
        ]
        if any(entries[spec.name]["data_offsets"] != [spec.offset, spec.offset + spec.nbytes] for spec in specs):
            raise ValueError("offsets and shapes disagree")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
        raise CorruptFile(f"{path}: the safetensors header is damaged. Do not train on it; use another copy.") from None
    return Layout(tuple(sorted(specs, key=lambda spec: spec.offset))), metadata


def header_size(head: bytes, path: Path) -> int:
    """Bytes before the data, from the first 8 bytes of a file that we wrote. Raises CorruptFile, naming `path`."""
    length = 8 + int.from_bytes(head[:8], "little")
    if len(head) < 8 or length % PAGE or not PAGE <= length <= _LARGEST_HEADER:
        raise CorruptFile(f"{path}: not a file that seqpart wrote whole (its header length is {length}).")
    return length
