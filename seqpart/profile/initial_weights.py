"""Reads a model's initial weights from files to the homes of its blocks, one tensor at a time."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from torch import nn

from seqpart.config import Data
from seqpart.errors import ModelError, StoreError
from seqpart.model.blocks import Block
from seqpart.model.inspection import packed_parts
from seqpart.model.live_modules import LiveModules
from seqpart.model.weight_files import Named, WeightFiles, matched, named_tensors, names_in_base
from seqpart.profile.blocks import BlockCost
from seqpart.profile.fake_mode import FakeMode
from seqpart.store.layout import Layout, TensorSpec

_NAMED = 4
"""Most names in a message."""


def initial_weights(
    data: Data, trained: Path | None, blocks: Sequence[Block], costs: Sequence[BlockCost], live: LiveModules
) -> "InitialWeights | None":
    """Weights that the settings name, or `trained` ones for blocks that do not hold theirs; None if there are none."""
    path = trained or data.weights
    if path is None or (trained is not None and not live.empty and all(block.alive is not None for block in blocks)):
        return None
    if trained is not None and not trained.exists():
        raise StoreError(
            f"{trained} is gone: the weights that the last fit has trained were in it. Restore it, or call fit again."
        )
    return InitialWeights(
        WeightFiles(path), blocks, [cost.layout for cost in costs], live.empty_tensors, partial=data.weights_partial,
        values_stay=trained is not None and not live.empty,  # else no module got back what it has learned
    )  # fmt: skip


def untie(model: nn.Module, files: WeightFiles) -> None:
    """Splits a tied parameter if `files` have different values for its names, as from_pretrained of transformers does."""
    tensors = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, source in matched(tensors, files.tensors).found.items():
        tensor = tensors[name]
        owner = first.setdefault(id(tensor), source)
        if isinstance(tensor, nn.Parameter) and owner != source and files.differ(owner, source, tensor.dtype):
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(tensor.detach().clone(), tensor.requires_grad))


class InitialWeights:
    """Initial weights of `blocks` in `files`; `layouts` say how tensors lie in the blocks' homes.

    partial: if True, tensors that the files lack, or have in another shape (a head for other classes), keep their values, and
    those that the model lacks are ignored; otherwise all three are refused. What a peft adapter adds to its base keeps its
    values. Raises ModelError for these, for tensors of other kinds, for different values of one parameter, for files with
    nothing of the model, and for tensors without values that the files lack.
    """

    def __init__(
        self, files: WeightFiles, blocks: Sequence[Block], layouts: Sequence[Layout], empty: Mapping[int, set[str]], *,
        partial: bool = False, values_stay: bool = False,
    ) -> None:  # fmt: skip
        """empty: {block given alive: names of tensors without values}. values_stay: its other tensors keep their values."""
        self._files = files
        mode = FakeMode()
        here = {one.name: one for one in named_tensors(blocks, layouts, lambda block: block.fake(mode)[0])}
        match = matched(list(here), files.tensors)
        self._sources: dict[int, dict[str, tuple[str, int]]] = {}
        """{block: {name of its tensor: (name in the files, elements there before it)}}."""
        unlike = {name: how for name, other in match.found.items() if (how := _unlike(here[name], files.tensors[other].spec))}
        kept = {name for name in unlike if partial and here[name].shape != files.tensors[match.found[name]].spec.shape}
        if wrong := [f"{name} is {how}" for name, how in unlike.items() if name not in kept]:
            raise ModelError(
                f"{files.path} holds the weights of another model: {_some(wrong)}. With --weights-partial those of another "
                "shape stay as initialized."
            )
        used = {name: source for name, source in match.found.items() if name not in kept}
        if partial and not used:
            raise ModelError(f"{files.path} has no tensor of this model: it has {_some(list(files.tensors))}.")
        first: dict[tuple[int, str], str] = {}
        for name, source in used.items():
            skip, (block, spec) = 0, here[name].pieces[0]
            owner = first.setdefault((block.number, spec.name), name)
            if owner != name and files.differ(used[owner], source, spec.dtype):
                path, _, leaf = name.rpartition(".")
                raise ModelError(
                    f"{owner} and {name} are one parameter of the model, and {files.path} has other values for one than for "
                    "the other (from_pretrained does not tie them then). Give each its own: part = "
                    f"model.get_submodule('{path}'); part.{leaf} = torch.nn.Parameter(part.{leaf}.detach().clone()). Or take "
                    "one of the two out of the file."
                )
            for block, spec in here[name].pieces:
                if not (values_stay and block.alive is not None and spec.name not in empty.get(block.number, ())):
                    self._sources.setdefault(block.number, {})[spec.name] = source, skip
                skip += prod(spec.shape)
        had = {(block.number, spec.name) for name in match.found for block, spec in here[name].pieces}
        missing = [name for name in match.missing if not had.issuperset((b.number, spec.name) for b, spec in here[name].pieces)]
        buffers = {block.exported(spec.name) for block, layout in zip(blocks, layouts, strict=True) for spec in layout.specs}
        buffers |= set(names_in_base(buffers).values())
        unexpected = [
            name for name in match.unexpected if name not in buffers and match.prefix + name not in buffers
        ]  # but for buffers that a state_dict leaves out today
        if not partial and (missing or unexpected):
            differ = {"missing": missing, "not in the model": unexpected}
            raise ModelError(
                f"{files.path} does not have the weights of this model, no more and no fewer: "
                + "; ".join(f"{what}: {_some(names)}" for what, names in differ.items() if names)
                + ". With --weights-partial what is missing stays as initialized, and the rest is ignored."
            )
        without = [
            block.exported(name) for block in blocks for name in sorted(empty.get(block.number, ()))
            if name not in self._sources.get(block.number, {})
        ]  # fmt: skip
        if without:
            raise ModelError(
                f"tensors on the meta device have no values, and {files.path} has none for them: {_some(without)}. Build "
                "their modules on the CPU, or give weights that have them."
            )
        others = {
            "as initialized, since they are an adapter's own": match.adapter,
            "as initialized, since they are not there": missing,
            "as initialized, since they have another shape there": [f"{name} is {unlike[name]}" for name in sorted(kept)],
            "ignored, since the model does not have them": unexpected,
        }
        remarks = [f"{what}: {_some(names)}" for what, names in others.items() if names]
        self.summary = "; ".join([f"weights: {len(used)} tensors of {files.path}", *remarks])

    def fill(self, block: Block, views: Mapping[str, torch.Tensor]) -> None:
        """Reads the block's tensors that the files have into `views`; the block must be built. Raises CorruptFile, StoreError;
        ModelError for weights that are quantized differently from the block's."""
        sources = self._sources.get(block.number, {})
        before = {name: view.clone() for name, view in views.items() if name in _packed_by(block)}
        for name, (source, skip) in sources.items():
            self._files.read(source, views[name], skip)
        for layout_in, packed in _packed_by(block).items():
            whole = layout_in in sources and torch.equal(before[layout_in], views[layout_in])
            if not whole and (wrong := [name for name in packed if name in sources]):
                raise ModelError(
                    f"{self._files.path} has {block.exported(wrong[0])} quantized in another way than the model's layer, "
                    "which cannot change. Load the model from these files, and leave the weights out here."
                )


def _packed_by(block: Block) -> dict[str, list[str]]:
    """{name of the tensor that says how weights are packed: names of the packed tensors}."""
    return {
        f"{path}.{packed.layout_in}".lstrip("."): [f"{path}.{name}".lstrip(".") for name in packed.tensors]
        for path, packed in packed_parts(block.module) if packed.layout_in
    }  # fmt: skip


def _unlike(spec: Named, stored: TensorSpec) -> str:
    """Says what differs; "" where the stored tensor can be read into the model's."""
    if spec.shape != stored.shape and not (prod(spec.shape) == prod(stored.shape) == 1):
        return f"of shape {spec.shape}, and of {stored.shape} there"
    if spec.dtype != stored.dtype and not (spec.dtype.is_floating_point and stored.dtype.is_floating_point):
        return f"of type {spec.dtype}, and of {stored.dtype} there"
    return ""


def _some(names: Sequence[str]) -> str:
    """Lists some names; layers that are alike share an entry: `h.*.attn.bias (12)`."""

    def like(name: str) -> str:
        return ".".join("*" if part.isdigit() else part for part in name.split("."))

    groups = [list(group) for _, group in groupby(sorted(names, key=like), key=like)]
    shown = [group[0] if len(group) == 1 else f"{like(group[0])} ({len(group)})" for group in groups]
    return ", ".join(shown[:_NAMED]) + (f", and {len(shown) - _NAMED} more" if len(shown) > _NAMED else "")
