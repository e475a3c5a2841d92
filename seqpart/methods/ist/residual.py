"""Assigns residual blocks to parts as whole blocks, so that a part is a shallower network.

C. Dun, C. R. Wolfe, C. M. Jermaine and A. Kyrillidis, "ResIST: Layer-Wise Decomposition of ResNets for Distributed Training"
(2022): of a residual network only the section with most blocks is divided (the third of a ResNet's four), without its first
block, which changes the shape; each of its blocks belongs to one part in a round, and a part has them in the network's order.

    the whole      x + f1   x + f2   x + f3   x + f4   x + f5
    part 0         x + S f2   x + S f3   x + S f5               S: the number of parts
    part 1         x + S f1   x + S f4   x

The paper trains x + f and tests x + f / S. Here f stands for its f / S: the same networks, and the whole one is the user's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import nn

from seqpart.errors import ModelError
from seqpart.methods.ist.hidden import kind_of, wrapped
from seqpart.methods.ist.narrow import index_sets, widths
from seqpart.model.blocks import Factory
from seqpart.model.inspection import is_listened_to, structure_of
from seqpart.model.tensors import tensors_of

_BRANCHES = {
    "torchvision.models.resnet.BasicBlock": ("bn2",),
    "torchvision.models.resnet.Bottleneck": ("bn3",),
    "timm.models.resnet.BasicBlock": ("se", "bn2"),
    "timm.models.resnet.Bottleneck": ("se", "bn3"),
}
"""Module whose output is the residual, by type of block; the first of the names that exists."""


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive blocks of the chain that are interchangeable; each adds the output of its module `branch` to its input.

    number: keys its random permutation, as a hidden layer's number does.
    """

    number: int
    blocks: tuple[int, ...]
    branch: str

    def depth(self, part: int, parts: int) -> int:
        """Returns the number of blocks that `part` has in every round."""
        return widths(len(self.blocks), parts, 1)[part]

    def dealt(self, seed: int, round_: int, parts: int) -> dict[int, tuple[int, int]]:
        """Returns {block: (its part, the block whose place it takes there)}: a part fills the section's first places."""
        sets = index_sets(seed, round_, self.number, len(self.blocks), parts, 1)
        return {
            self.blocks[which]: (part, self.blocks[place])
            for part, own in enumerate(sets)
            for place, which in enumerate(own)
        }  # fmt: skip


def section_of(modules: Sequence[nn.Module], divided: frozenset[int], number: int) -> Section | None:
    """Returns the longest run of interchangeable residual blocks, the last of equally long ones; None if there are no two.

    divided: blocks with hidden layers, which are left out. Raises ModelError for an invalid `residual_branch`.
    """
    kinds = [None if block in divided else _kind(module, block) for block, module in enumerate(modules)]
    rows = [list(own) for kind, own in groupby(range(len(modules)), lambda block: kinds[block]) if kind is not None]
    longest = max(rows, key=lambda own: (len(own), own[0]), default=[])
    if len(longest) < 2:
        return None
    branch = _branch_of(modules[longest[0]], longest[0])
    assert branch is not None
    return Section(number, tuple(longest), branch)


def _kind(module: nn.Module, block: int) -> object | None:
    """Returns a key that is equal for interchangeable residual blocks; None for other blocks."""
    branch = _branch_of(module, block)
    return None if branch is None else (branch, structure_of(module, tensors_of(module)))


def _branch_of(module: nn.Module, block: int) -> str | None:
    """Returns the path of the module that outputs the residual: declared by `residual_branch`, or known by its type."""
    inner, prefix = wrapped(module)
    own = getattr(inner, "residual_branch", None)
    found = own() if callable(own) else _known(inner)
    if found is None:
        return None
    where = f"block {block} ({type(inner).__name__})"
    if not isinstance(found, str) or found not in dict(inner.named_modules()) or not found:
        raise ModelError(
            f"{where}: residual_branch() must return the name of the module whose output the block adds to its input, or None; "
            f"found {found!r:.200}."
        )
    if any(map(is_listened_to, inner.modules())):
        raise ModelError(f"method ist deals out {where}, which has hooks: its copies would have none. Remove them.")
    return f"{prefix}.{found}" if prefix else found


def _known(module: nn.Module) -> str | None:
    names = _BRANCHES.get(kind_of(module), ())
    if getattr(module, "downsample", None) is not None:
        return None  # what it adds to has another shape than its input
    return next((name for name in names if getattr(module, name, None) is not None), None)


def _times(factor: int, module: nn.Module, taken: object, given: torch.Tensor) -> torch.Tensor:
    """A forward hook that multiplies the output."""
    return given * factor


def scaled(source: Factory, branch: str, parts: int) -> nn.Module:
    """Returns a module of `source` with its residual multiplied by `parts`."""
    module = source()
    module.get_submodule(branch).register_forward_hook(partial(_times, parts))
    return module
