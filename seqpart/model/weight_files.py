"""Weights in safetensors files: matches names, reads initial weights, builds models without memory, writes results."""

import copy
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import nn

from seqpart.device.pages import bytes_of
from seqpart.errors import CorruptFile, ModelError, OptionError
from seqpart.files import opened
from seqpart.model.blocks import Block
from seqpart.model.tensors import tensors_of
from seqpart.store.direct import explaining
from seqpart.store.layout import DTYPES, LARGEST_HEADER, Layout, TensorSpec, decode_entries

INDEX = ".safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PARTS = "DCP_SHARDING_INFO"
_CHUNK = 1 << 20
"""Elements converted at a time."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, row by row; or one whose parts are in several, as ranks have written them."""

    path: Path
    spec: TensorSpec
    start: int
    """Offset of its first byte in the file."""
    first: tuple[int, ...] = ()
    """Place of its first element in the whole tensor, of which it may be a part."""
    parts: tuple["Stored", ...] = ()

    def runs(self, part: "Stored") -> Iterator[tuple[int, int, int]]:
        """Yields (element of this tensor, element of `part`, elements) of stretches that lie together in both."""
        shape, whole = part.spec.shape, self.spec.shape
        split = max((axis for axis in range(len(whole)) if shape[axis] != whole[axis]), default=0)  # those behind it are whole
        count = prod(shape[split:])
        rows = itertools.product(*(range(first, first + n) for first, n in zip(part.first[:split], shape, strict=False)))
        for number, row in enumerate(rows):
            place = (*row, *part.first[split : split + 1])
            yield sum(at * prod(whole[axis + 1 :]) for axis, at in enumerate(place)), number * count, count


class WeightFiles:
    """The tensors of `path`: a safetensors file, or a directory with one, or with several and their index, or with the parts
    that several ranks wrote by torch.distributed.checkpoint.HuggingFaceStorageWriter.

    Only headers are read. Raises OptionError where there is no such file, or only pickles, CorruptFile for damaged ones.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        parts: dict[str, list[Stored]] = {}
        files, shard_of = _files(path)
        for file in files:
            for stored in _tensors(file):
                if shard_of.get(stored.spec.name, file.name) == file.name:
                    parts.setdefault(stored.spec.name, []).append(stored)
        self.tensors = {name: _whole(path, found) for name, found in parts.items()}

    def read(self, name: str, view: torch.Tensor, skip: int = 0) -> None:
        """Fills `view`, on the CPU, with the tensor, or with its rows after `skip` elements; converts floating-point types.

        Holds a few MB at most where `view` lies row by row. Raises CorruptFile for a file that has become shorter,
        StoreError where it cannot be read.
        """
        stored = self.tensors[name]
        flat = view.view(-1) if view.is_contiguous() else torch.empty(view.numel(), dtype=view.dtype)
        for part in stored.parts or (stored,):
            with explaining(part.path), open(opened(part.path.resolve()), "rb") as file:
                for begins, at, count in stored.runs(part) if stored.parts else [(0, 0, prod(stored.spec.shape))]:
                    begin, end = max(begins, skip), min(begins + count, skip + flat.numel())
                    if begin < end:
                        file.seek(part.start + (at + begin - begins) * part.spec.dtype.itemsize)
                        _fill(flat[begin - skip : end - skip], part, file)
        if not view.is_contiguous():
            view.copy_(flat.view(view.shape))

    def differ(self, name: str, other: str, dtype: torch.dtype) -> bool:
        """True if two tensors differ once converted to `dtype`. They are read piece by piece."""
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


def _whole(path: Path, parts: Sequence[Stored]) -> Stored:
    """Returns the tensor of these parts. Raises CorruptFile where some are not there, or are of another save."""
    one, kinds = parts[0], {(part.spec.dtype, len(part.first)) for part in parts}
    ends = ([first + n for first, n in zip(part.first, part.spec.shape, strict=True)] for part in parts)
    shape = tuple(map(max, zip(*ends, strict=len(kinds) == 1)))
    if len(kinds) > 1 or sum(prod(part.spec.shape) for part in parts) != prod(shape):
        raise CorruptFile(
            f"{path}: the {len(parts)} part(s) of {one.spec.name} do not make a tensor of shape {shape}. Take a directory with "
            "all the files of one save, and no others.", path,
        )  # fmt: skip
    return one if len(parts) == 1 else Stored(one.path, replace(one.spec, shape=shape), one.start, parts=tuple(parts))


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
    """Returns (files, {name of a tensor: file that has it, as far as an index says so})."""
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
    if found and all(file.name.startswith("shard-") for file in found):
        return found, {}
    if found:
        raise OptionError(
            f"--weights: {path} has {', '.join(file.name for file in (*found, *indexes)[:4])}, and which of them are meant is "
            "not known. Name the file, or the index."
        )
    if any(path.glob("*.distcp")):
        raise OptionError(
            f"--weights: {path} is a checkpoint of torch.distributed.checkpoint in its own form, which is pickled. Save it "
            "with storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True), and give that folder."
        )
    for file in sorted(path.iterdir()):
        _refuse_pickle(file)
    raise OptionError(f"--weights: {path} has no safetensors file. Give one, or a directory that has some.")


def _refuse_pickle(path: Path) -> None:
    if path.suffix in PICKLES:
        raise OptionError(
            f"--weights: {path} is a pickle, which runs what is in it when it is read. If you trust it, write its tensors "
            "once more: safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')."
        )


def _indexed(index: Path) -> tuple[Sequence[Path], Mapping[str, str]]:
    """Returns the files that an index names, which must lie beside it, and {name of a tensor: file}."""
    try:
        with explaining(index):
            shard_of = json.loads(index.read_bytes())["weight_map"]
        names = set(shard_of.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptFile(f"{index} is no index of safetensors files. Use another copy.", index) from None
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CorruptFile(f"{index} names files that do not lie beside it. Use another copy.", index)
    missing = sorted(name for name in names if not (index.parent / name).is_file())
    if missing:
        raise OptionError(f"--weights: {index} names {missing[0]}, which is not beside it ({len(missing)} missing).")
    return [index.parent / name for name in sorted(names)], shard_of


def _tensors(path: Path) -> list[Stored]:
    with explaining(path), open(opened(path.resolve()), "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = file.read(length) if length <= LARGEST_HEADER else b""
        size = file.seek(0, 2)
    if not head or len(head) < length:
        raise CorruptFile(f"{path} is not a whole safetensors file. Use another copy.", path)
    _refuse_types(head, path)
    layout, metadata = decode_entries(head, path)
    places = _places(metadata, layout, path)
    found = [Stored(path, spec, 8 + length + spec.offset, place) for spec, place in zip(layout.specs, places, strict=True)]
    if any(stored.spec.stride is not None for stored in found):
        raise ModelError(f"{path} holds one block of a run, not the weights of a model. Give the weights that a run left.")
    if any(stored.start + stored.spec.nbytes > size or stored.spec.offset < 0 for stored in found):
        raise CorruptFile(f"{path} ends before its last tensor: it was not copied whole. Use another copy.", path)
    ordered = sorted(found, key=lambda stored: stored.start)
    if any(one.start + one.spec.nbytes > other.start for one, other in itertools.pairwise(ordered)):
        raise CorruptFile(f"{path} has tensors that lie over each other. Use another copy.", path)
    return found


def _places(metadata: Mapping[str, str], layout: Layout, path: Path) -> list[tuple[int, ...]]:
    """Returns for each tensor where its first element is in that of which it may be a part."""
    try:
        info, places = json.loads(metadata.get(_PARTS, "{}")), list[tuple[int, ...]]()
        for spec in layout.specs:
            places.append(tuple(map(int, info[spec.name]["saved_offsets"])) if info else (0,) * len(spec.shape))
            if len(places[-1]) != len(spec.shape) or min(places[-1], default=0) < 0:
                raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptFile(f"{path}: its {_PARTS} does not say where its tensors belong. Use another copy.", path) from None
    return places


def _refuse_types(head: bytes, path: Path) -> None:
    try:
        found = {entry.get("dtype", "F32") for entry in json.loads(head).values()}
    except (ValueError, AttributeError, TypeError):
        return  # it is damaged, which is found when it is decoded
    if unknown := sorted(map(str, found - set(DTYPES))):
        raise ModelError(f"{path} holds tensors of type {', '.join(unknown)}, which cannot be stored here. Convert them.")


Modules = Callable[[Block], nn.Module]


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of the model's state_dict. pieces: blocks whose homes hold it, and where; several hold its rows one after the
    other."""

    name: str
    pieces: tuple[tuple[Block, TensorSpec], ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0][1].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        (_, first), *others = self.pieces
        return (sum(spec.shape[0] for _, spec in self.pieces), *first.shape[1:]) if others else first.shape

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for _, spec in self.pieces)


def named_tensors(blocks: Sequence[Block], layouts: Sequence[Layout], module_of: Modules) -> Iterator[Named]:
    """Yields the model's tensors, widest elements first so that no tensor of a file is misaligned.

    A state_dict leaves some buffers out and may name one parameter twice: it decides, by identity.
    """
    found = []
    for block, layout in zip(blocks, layouts, strict=True):
        module, place = module_of(block), {spec.name: spec for spec in layout.specs}
        tensors = tensors_of(module)
        source = {id(tensor): (block, place[name]) for name, tensor in block.own(tensors).items() if name in place}
        for tie in block.tied:  # under both names, as a state_dict has it
            owned = next(spec for spec in layouts[tie.owner.number].specs if spec.name == tie.owner_name)
            source[id(tensors[tie.name])] = tie.owner, owned
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) in source:
                owner, spec = source[id(tensor)]
                found.append((owner, block.exported(name), spec))
    known = {name: (owner, spec) for owner, name, spec in found}
    for alias, name in getattr(blocks, "aliases", {}).items():
        found.append((known[name][0], alias, known[name][1]))
    pieces: dict[str, list[tuple[Block, TensorSpec]]] = {}
    wholes: Mapping[str, str] = getattr(blocks, "wholes", {})
    for owner, name, spec in found:
        own = pieces.setdefault(wholes.get(name, name), [])
        if (owner, spec) not in own:  # a module that is called twice is in two blocks
            own.append((owner, spec))
    named = [Named(name, tuple(own)) for name, own in pieces.items()]
    yield from sorted(named, key=lambda one: -one.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Match:
    """Names that match. found: {name in the model: name in the file}. missing: only in the model; unexpected: in the file."""

    found: Mapping[str, str]
    missing: Sequence[str]
    unexpected: Sequence[str]
    prefix: str
    """Prefix that only the names of the model, or only those of the file, have; "" where they are the same."""
    adapter: Sequence[str] = ()
    """Names in the model of an adapter's own tensors, which are not in the file of its base."""


def matched(wanted: Collection[str], stored: Collection[str]) -> Match:
    """Matches names as they are, or with all of the file's, or all of the model's, without a first part that the others lack:
    `module.` of DataParallel, `transformer.` of a GPT-2 that was saved without its head. Names of a peft model are also tried
    as its base has them."""
    best: dict[str, str] = {}
    prefix, own = "", frozenset[str]()
    for names in filter(None, ({name: name for name in wanted}, names_in_base(wanted))):
        for first in ["", *sorted({f"{name.partition('.')[0]}." for name in (*names.values(), *stored) if "." in name})]:
            more = {name.removeprefix(first) if first else name: name for name in stored}
            less = {f"{first}{name}": name for name in stored}
            for known in (more, less):
                found = {name: known[base] for name, base in names.items() if base in known}
                if len(found) > len(best):
                    best, prefix, own = found, first, frozenset(wanted) - names.keys()
    missing, used = [name for name in wanted if name not in best], set(best.values())
    return Match(
        best, [name for name in missing if name not in own], [name for name in stored if name not in used], prefix,
        [name for name in missing if name in own],
    )  # fmt: skip


_IN_PEFT, _WRAPPED = "base_model.model.", ".base_layer."


def names_in_base(names: Collection[str]) -> dict[str, str]:
    """{name in a peft model: name in its base model}, without tensors of the adapter itself, which lie in a layer beside its
    `base_layer`. A module that is trained whole is there twice. Empty for another model."""
    wrapped = {name.partition(_WRAPPED)[0] for name in names if _WRAPPED in name}
    found = {}
    for name in names:
        parts = name.split(".")
        inside = any(".".join(parts[:end]) in wrapped for end in range(1, len(parts)))
        if name.startswith(_IN_PEFT) and (_WRAPPED in name or not inside):
            base = name.removeprefix(_IN_PEFT).replace(_WRAPPED, ".").replace(".original_module.", ".")
            found[name] = re.sub(r"\bmodules_to_save\.[^.]+\.", "", base)
    return found


def is_adapted(model: object) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "save_pretrained") and hasattr(model, "active_adapters")


def write_adapter(folder: Path, weights: Path, model: Any) -> None:
    """Writes what `PeftModel.from_pretrained(base, folder)` reads. From `weights`, the file of all the model's tensors, only
    those of adapters are read. Raises OptionError for a model that is not peft's, StoreError where writing fails."""
    if not is_adapted(model):
        raise OptionError(
            f"save_adapter: expected a run of a peft model, as get_peft_model makes it; found {type(model).__name__}. "
            "`weights` and save_pretrained have the whole model."
        )
    with explaining(folder):
        with safe_open(weights, framework="pt") as file:
            learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
            # The name of an adapter is a part of its tensors' names.
            named = [name for name in file.keys() if name in learned or {*model.peft_config} & {*name.split(".")}]  # noqa: SIM118
            state = {name: file.get_tensor(name) for name in named}
        # Otherwise peft asks the hub if embeddings were made larger; those that learn are among its modules to save.
        model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)


_META = "_seqpart_on_meta"


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which new modules have their parameters on the meta device, so that a model never exists whole; buffers are
    real."""
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param if param is None or param.is_meta else _on_meta(param))

    with patch.object(nn.Module, "register_parameter", without_memory):
        yield


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    """Moves a parameter to the meta device; returns the same one for a parameter that several modules share."""
    known = getattr(param, _META, None)
    if known is None:
        known = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        setattr(param, _META, known)
    return known


MODEL = "model.safetensors"


def write_pretrained(folder: Path, weights: Path, config: Any) -> None:
    """Writes `weights` to `folder` as model.safetensors, and for a transformers model its `config` and the other files of the
    directory that it was loaded from. Raises StoreError, and OptionError where there are weights already."""
    with explaining(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if there := sorted(path.name for path in folder.iterdir() if _is_weights(path)):
            raise OptionError(f"{folder} holds weights already: {there[0]}. Give another directory, or remove them.")
        if hasattr(config, "save_pretrained"):
            _write_config(folder, weights, config)
        _link_or_copy(weights, folder / MODEL)  # last: with it the directory is whole


def _is_weights(path: Path) -> bool:
    return path.suffix in (".safetensors", *PICKLES) or path.name.endswith(INDEX)


def _write_config(folder: Path, weights: Path, config: Any) -> None:
    source = Path(getattr(config, "_name_or_path", "") or "nowhere")
    for path in sorted(source.iterdir()) if (source / "config.json").is_file() else ():
        if path.is_file() and not _is_weights(path):
            shutil.copyfile(path, folder / path.name)
    own = copy.deepcopy(config)
    types = {stored.spec.dtype for stored in WeightFiles(weights).tensors.values() if stored.spec.dtype.is_floating_point}
    if len(types) == 1:
        own.dtype = types.pop()
    own.save_pretrained(folder)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        part = target.with_name(target.name + ".part")
        shutil.copyfile(source, part)
        part.replace(target)
