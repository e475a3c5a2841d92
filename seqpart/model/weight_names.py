"""Which tensor of a file is which of the model."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from seqpart.model.blocks import Block
from seqpart.model.tensors import tensors_of
from seqpart.store.layout import Layout, TensorSpec

Modules = Callable[[Block], nn.Module]


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of the model's state_dict. pieces: blocks whose homes it is in, and where it lies there; several have its rows
    one after the other."""

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
    """The model's, widest elements first so that no tensor of a file is misaligned.

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
    """found: {name in the model: name in the file}. missing: names in the model; unexpected: names in the file."""

    found: Mapping[str, str]
    missing: Sequence[str]
    unexpected: Sequence[str]
    prefix: str
    """What the names of the one have before those of the other; "" where they are the same."""
    adapter: Sequence[str] = ()
    """Names in the model of an adapter's own tensors, which are not in the file: it is its base's."""


def matched(wanted: Collection[str], stored: Collection[str]) -> Match:
    """Names are taken as they are; or all of the file's, or all of the model's, without a first part that the others have not:
    `module.` of DataParallel, `transformer.` of a GPT-2 that was saved without its head. Those of a model of peft are also
    taken as its base has them."""
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
    """{name in a model of peft: name in the model that it was made of}, without those of the adapter itself: what lies in a
    layer beside its `base_layer`. A module that is trained whole is there twice. Empty for another model."""
    wrapped = {name.partition(_WRAPPED)[0] for name in names if _WRAPPED in name}
    found = {}
    for name in names:
        parts = name.split(".")
        inside = any(".".join(parts[:end]) in wrapped for end in range(1, len(parts)))
        if name.startswith(_IN_PEFT) and (_WRAPPED in name or not inside):
            base = name.removeprefix(_IN_PEFT).replace(_WRAPPED, ".").replace(".original_module.", ".")
            found[name] = re.sub(r"\bmodules_to_save\.[^.]+\.", "", base)
    return found
