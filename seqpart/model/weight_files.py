"""Tensors of safetensors files by name: of one file, or of all that the index of a directory names. Read piece by piece."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from seqpart.device.pages import bytes_of
from seqpart.errors import CorruptFile, ModelError, OptionError
from seqpart.files import opened
from seqpart.store.direct import explained
from seqpart.store.layout import DTYPES, TensorSpec, decode_entries

INDEX = ".safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LARGEST_HEADER = 64 << 20
_CHUNK = 1 << 20
"""Elements that are converted at a time."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, row by row."""

    path: Path
    spec: TensorSpec
    start: int
    """Its first byte in the file."""


class WeightFiles:
    """The tensors of `path`: a safetensors file, or a directory with one, or with several and their index.

    Only headers are read. Raises OptionError where there is no such file, or only pickles, CorruptFile for damaged ones.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Stored] = {}
        files, shard_of = _files(path)
        for file in files:
            for stored in _tensors(file):
                if shard_of.get(stored.spec.name, file.name) == file.name:
                    self.tensors[stored.spec.name] = stored

    def read(self, name: str, view: torch.Tensor, skip: int = 0) -> None:
        """Fill `view`, on the CPU, of the tensor's shape, or of its rows behind `skip` elements; another floating-point type is
        converted.

        Holds a few MB at most where `view` lies row by row. Raises CorruptFile for a file that has become shorter,
        StoreError where it cannot be read.
        """
        stored = self.tensors[name]
        try:
            with open(opened(stored.path.resolve()), "rb") as file:
                file.seek(stored.start + skip * stored.spec.dtype.itemsize)
                flat = view.view(-1) if view.is_contiguous() else torch.empty(view.numel(), dtype=view.dtype)
                _fill(flat, stored, file)
        except OSError as error:
            raise explained(error, stored.path) from None
        if not view.is_contiguous():
            view.copy_(flat.view(view.shape))

    def differ(self, name: str, other: str, dtype: torch.dtype) -> bool:
        """Whether two tensors have other numbers, as a parameter of that type has them. They are read piece by piece."""
        count = prod(self.tensors[name].spec.shape)
        if count != prod(self.tensors[other].spec.shape):
            return True
        pieces = torch.empty(2, min(_CHUNK, count), dtype=dtype)
        for start in range(0, count, _CHUNK):
            one, two = pieces[:, : count - start]
            self.read(name, one, start)
            self.read(other, two, start)
            if not torch.equal(one.view(torch.uint8), two.view(torch.uint8)):
                return True
        return False


def _fill(flat: torch.Tensor, stored: Stored, file: BinaryIO) -> None:
    same = flat.dtype == stored.spec.dtype
    part = flat[:0] if same else torch.empty(min(_CHUNK, flat.numel()), dtype=stored.spec.dtype)
    for start in range(0, flat.numel(), _CHUNK):
        here = flat[start : start + _CHUNK]
        into = here if same else part[: here.numel()]
        if file.readinto(bytes_of(into.view(torch.uint8))) < into.nbytes:  # type: ignore[attr-defined]
            raise CorruptFile(f"{stored.path} became shorter while it was read. Use another copy.", stored.path)
        if not same:
            here.copy_(into)


def _files(path: Path) -> tuple[Sequence[Path], Mapping[str, str]]:
    """Files, and by name of a tensor which of several has it, as far as an index says so."""
    if not path.exists():
        raise OptionError(f"--weights: {path} does not exist. Give a safetensors file, or a directory that has some.")
    if not path.is_dir():
        _refuse_pickle(path)
        return _indexed(path) if path.name.endswith(INDEX) else ([path], {})
    indexes = sorted(path.glob(f"*{INDEX}"))
    found = sorted(path.glob("*.safetensors"))
    one = [file for file in found if file.name in ("model.safetensors", "weights.safetensors")]
    if len(one) == 1 or (not one and not indexes and len(found) == 1):
        return one or found, {}
    if len(indexes) == 1 and not one:
        return _indexed(indexes[0])
    if found:
        raise OptionError(
            f"--weights: {path} has {', '.join(file.name for file in (*found, *indexes)[:4])}, and which of them are meant is "
            "not known. Name the file, or the index."
        )
    for file in sorted(path.iterdir()):
        _refuse_pickle(file)
    raise OptionError(f"--weights: {path} has no safetensors file. Give one, or a directory that has some.")


def _refuse_pickle(path: Path) -> None:
    if path.suffix in PICKLES:
        raise OptionError(
            f"--weights: {path} is a pickle, which runs what is in it when it is read. Where you trust it, write its tensors "
            "once more: safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')."
        )


def _indexed(index: Path) -> tuple[Sequence[Path], Mapping[str, str]]:
    """Files that an index names, which must lie beside it."""
    try:
        shard_of = json.loads(index.read_bytes())["weight_map"]
        names = set(shard_of.values())
    except OSError as error:
        raise explained(error, index) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptFile(f"{index} is no index of safetensors files. Use another copy.", index) from None
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CorruptFile(f"{index} names files that do not lie beside it. Use another copy.", index)
    missing = sorted(name for name in names if not (index.parent / name).is_file())
    if missing:
        raise OptionError(f"--weights: {index} names {missing[0]}, which is not beside it ({len(missing)} missing).")
    return [index.parent / name for name in sorted(names)], shard_of


def _tensors(path: Path) -> list[Stored]:
    try:
        with open(opened(path.resolve()), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = file.read(length) if length <= _LARGEST_HEADER else b""
            size = file.seek(0, 2)
    except OSError as error:
        raise explained(error, path) from None
    if not head or len(head) < length:
        raise CorruptFile(f"{path} is not a whole safetensors file. Use another copy.", path)
    _refuse_types(head, path)
    layout, _ = decode_entries(head, path)
    found = [Stored(path, spec, 8 + length + spec.offset) for spec in layout.specs]
    if any(stored.spec.stride is not None for stored in found):
        raise ModelError(f"{path} is the home of a block, not the weights of a model. Give the weights that a run left.")
    if any(stored.start + stored.spec.nbytes > size or stored.spec.offset < 0 for stored in found):
        raise CorruptFile(f"{path} ends before its last tensor: it was not copied whole. Use another copy.", path)
    return found


def _refuse_types(head: bytes, path: Path) -> None:
    try:
        found = {entry.get("dtype", "F32") for entry in json.loads(head).values()}
    except (ValueError, AttributeError, TypeError):
        return  # it is damaged, which is found when it is decoded
    if unknown := sorted(map(str, found - set(DTYPES))):
        raise ModelError(f"{path} holds tensors of type {', '.join(unknown)}, which have no home. Convert them.")
