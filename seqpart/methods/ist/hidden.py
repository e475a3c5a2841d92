"""Finds a chain's hidden layers: the units that can be divided among parts, and the tensors whose rows or columns they are.

It walks through linear layers, normalisations and elementwise activations, as blocks of their own or inside nn.Sequential. A
module of another kind declares its hidden layers with a method:

    def hidden_layers(self) -> list[Hidden]: ...
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.nn.functional as F
from torch import nn

from seqpart.errors import ModelError
from seqpart.model.inspection import ACTIVATIONS, is_listened_to

NORMS = (nn.BatchNorm1d, nn.LayerNorm, nn.RMSNorm)
ELEMENTWISE = (*ACTIVATIONS, nn.Dropout)
_SILENT = (nn.Identity, nn.Dropout)


class Side(NamedTuple):
    """A module whose outputs, or inputs, are before x units x after of a hidden layer's units."""

    path: str
    before: int = 1
    after: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Hidden:
    """A hidden layer inside one module; paths are those of its submodules."""

    units: int
    rows: tuple[Side, ...]
    """Modules that output the units: linear layers, and normalisations over them."""
    columns: tuple[Side, ...] = ()
    """Linear layers whose inputs are the units, and whose outputs are not normalised before they are added to something."""
    counts: tuple[str | Side, ...] = ()
    """Attributes that hold the number of units, or before x units x after of them."""
    placed: bool = False
    """True if the output of `rows` keeps its full width, with zeros for the units of other parts: what follows must map zeros
    to zeros, and be added to something."""
    alone: bool = False
    """True if units are assigned one by one and never in groups, as attention heads are."""


class Spot(NamedTuple):
    """A `Side` of block number `block`."""

    block: int
    side: Side


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenLayer:
    """A hidden layer of the whole chain, which may reach from one block into another."""

    number: int
    units: int
    rows: tuple[Spot, ...]
    columns: tuple[Spot, ...]
    summed: frozenset[tuple[int, str]]
    """(block, path) of the `columns` whose sums are not normalised."""
    counts: tuple[Spot, ...] = ()
    placed: bool = False
    alone: bool = False


class _Leaf(NamedTuple):
    block: int
    path: str
    module: nn.Module

    def __str__(self) -> str:
        where = f", layer {self.path}" if self.path else ""
        return f"block {self.block} ({type(self.module).__name__}{where})"


def hidden_layers(modules: Sequence[nn.Module]) -> list[HiddenLayer]:
    """Returns the hidden layers of a chain of `modules`, in order. Raises ModelError for those without a normalisation."""
    leaves = [leaf for number, module in enumerate(modules) for leaf in _leaves(*wrapped(module), number)]
    found = [layer for leaf in leaves for layer in _declared(leaf)]
    bare = []
    for number, leaf in enumerate(leaves):
        between = _until_linear(leaves, number) if _is_linear(leaf.module) else None
        if between is None:
            continue
        taker = leaves[number + len(between) + 1]
        norms = [one for one in between if isinstance(one.module, NORMS)]
        if not norms:
            bare.append(f"{leaf} and {taker}")
        found.append(_between(leaf, norms, taker, _normalised_after(leaves, number + len(between) + 1)))
    if bare:
        raise ModelError(
            "method ist needs a normalisation in every hidden layer, since a neuron of a subnet gets the inputs of that subnet "
            f"alone: there is none between {'; nor between '.join(bare)}. Put nn.BatchNorm1d or nn.LayerNorm after each of "
            "these linear layers."
        )
    _refuse_listeners(modules, found)
    found.sort(key=lambda layer: (layer.rows[0].block, layer.rows[0].side.path))
    return [replace(layer, number=number) for number, layer in enumerate(found)]


def _refuse_listeners(modules: Sequence[nn.Module], layers: Sequence[HiddenLayer]) -> None:
    """Raises ModelError for layers with hooks, which their narrow copies would not have, and for layers divided twice."""
    columns = [(spot.block, spot.side.path) for layer in layers for spot in layer.columns]
    rows = [(spot.block, spot.side.path) for layer in layers for spot in layer.rows]
    for block, path in (*rows, *columns):
        where = f"layer {path or type(modules[block]).__name__} of block {block}"
        if is_listened_to(modules[block].get_submodule(path)):
            raise ModelError(f"method ist divides {where}, which has hooks: narrow copies of it would have none. Remove them.")
        if rows.count((block, path)) > 1 or columns.count((block, path)) > 1:
            raise ModelError(f"method ist divides {where} twice. Correct its hidden_layers().")


def wrapped(module: nn.Module) -> tuple[nn.Module, str]:
    """Returns (module, path in the block) of the one module that a block only wraps, else (`module`, "")."""
    path = getattr(module, "wraps", None)
    return (module.get_submodule(path), path) if isinstance(path, str) else (module, "")


def _leaves(module: nn.Module, path: str, block: int) -> Iterator[_Leaf]:
    if type(module) is nn.Sequential:
        for name, child in module._modules.items():
            if child is not None:
                yield from _leaves(child, f"{path}.{name}" if path else name, block)
    else:
        yield _Leaf(block, path, module)


def _declared(leaf: _Leaf) -> Iterator[HiddenLayer]:
    own = getattr(leaf.module, "hidden_layers", None)
    declared = own() if callable(own) else _of_library(leaf.module)
    if not isinstance(declared, list | tuple):
        raise ModelError(f"{leaf}: hidden_layers() must return a list of Hidden; found a {type(declared).__name__}.")
    for hidden in declared:
        prefix = f"{leaf.path}." if leaf.path else ""

        def spots(sides: tuple[Side, ...], prefix: str = prefix) -> tuple[Spot, ...]:
            return tuple(Spot(leaf.block, side._replace(path=prefix + side.path)) for side in sides)

        _refuse_declared(leaf, hidden)
        yield HiddenLayer(
            number=0, units=hidden.units, rows=spots(hidden.rows), columns=spots(hidden.columns),
            summed=frozenset((leaf.block, prefix + side.path) for side in hidden.columns),
            counts=spots(tuple(map(_counted, hidden.counts))), placed=hidden.placed, alone=hidden.alone,
        )  # fmt: skip


def _refuse_declared(leaf: _Leaf, hidden: object) -> None:
    """Raises ModelError, naming the block, if `hidden` is not a Hidden or does not fit the module."""
    if not (isinstance(hidden, Hidden) and hidden.rows and all(isinstance(s, Side) for s in (*hidden.rows, *hidden.columns))):
        raise ModelError(f"{leaf}: hidden_layers() must return Hidden with rows of Side; found {hidden!r:.200}.")
    inside = dict(leaf.module.named_modules())
    for side in (*hidden.rows, *hidden.columns):
        if side.path not in inside:
            raise ModelError(f"{leaf}: hidden_layers() names {side.path!r}, which is none of its modules.")
        replaced = side in hidden.columns or (hidden.placed and side in hidden.rows)
        if replaced and type(inside[side.path]) is not nn.Linear:
            kind = type(inside[side.path]).__name__
            raise ModelError(f"{leaf}: hidden_layers() has {side.path!r} in columns or placed; it is a {kind}, not nn.Linear.")
    for path, *_ in map(_counted, hidden.counts):
        place, _, name = path.rpartition(".")
        if place not in inside or not isinstance(getattr(inside[place], name, None), int):
            raise ModelError(f"{leaf}: hidden_layers() counts {path!r}, which is no attribute with a number.")


def _counted(attribute: str | Side) -> Side:
    return attribute if isinstance(attribute, Side) else Side(attribute)


def kind_of(module: nn.Module) -> str:
    """Returns the qualified name of the module's type, so that a library's types are known without importing it."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _of_library(module: nn.Module) -> list[Hidden]:
    """Returns the hidden layers of known transformer blocks: heads, unless a layer spans all of them, and the MLP's neurons."""
    if kind_of(module) == "torchvision.models.vision_transformer.EncoderBlock":
        return _perceptron(module, "mlp.0", "mlp.3")
    if type(module) is nn.TransformerEncoderLayer:
        elementwise = module.activation in (F.relu, F.gelu) or type(module.activation) in ACTIVATIONS
        return _perceptron(module, "linear1", "linear2") if elementwise else []
    if kind_of(module) != "timm.models.vision_transformer.Block":
        return []
    found, attention, mlp = list[Hidden](), module.get_submodule("attn"), module.get_submodule("mlp")
    whole = getattr(attention, "gate", None) is not None or not isinstance(getattr(attention, "norm", None), nn.Identity)
    if kind_of(attention) == "timm.layers.attention.Attention" and _is_linear(attention.get_submodule("proj")) and not whole:
        size = int(attention.head_dim)  # type: ignore[arg-type]
        found.append(
            Hidden(
                units=int(attention.num_heads), rows=(Side("attn.qkv", 3, size),),  # type: ignore[arg-type]
                columns=(Side("attn.proj", 1, size),), counts=("attn.num_heads", Side("attn.attn_dim", 1, size)), alone=True,
            )
        )  # fmt: skip
    if kind_of(mlp) == "timm.layers.mlp.Mlp" and isinstance(mlp.norm, nn.Identity):
        found += _perceptron(module, "mlp.fc1", "mlp.fc2")
    return found


def _perceptron(module: nn.Module, first: str, second: str) -> list[Hidden]:
    """Returns the hidden layer between two linear layers; none if these are others, such as adapters or 1 x 1 convolutions."""
    if not (_is_linear(module.get_submodule(first)) and _is_linear(module.get_submodule(second))):
        return []
    units = module.get_submodule(first).out_features
    return [Hidden(units=units, rows=(Side(first),), columns=(Side(second),))]  # type: ignore[arg-type]


def _is_linear(module: nn.Module) -> bool:
    """True for exactly nn.Linear: a subclass may do something else."""
    return type(module) is nn.Linear


def _until_linear(leaves: Sequence[_Leaf], first: int) -> list[_Leaf] | None:
    """Returns the leaves between linear layer number `first` and the next one if all of them act on each unit; else None."""
    units, between = leaves[first].module.out_features, list[_Leaf]()
    for leaf in leaves[first + 1 :]:
        module = leaf.module
        if _is_linear(module):
            return between if module.in_features == units else None
        if not (type(module) in ELEMENTWISE or (type(module) in NORMS and _width(module) == units)):
            return None
        between.append(leaf)
    return None


def _width(module: nn.Module) -> int | None:
    """Returns the number of units that a normalisation spans."""
    if isinstance(module, nn.BatchNorm1d):
        return module.num_features
    shape: Sequence[int] = getattr(module, "normalized_shape", ())
    return int(shape[0]) if len(shape) == 1 else None


def _normalised_after(leaves: Sequence[_Leaf], number: int) -> bool:
    behind = (leaf.module for leaf in leaves[number + 1 :])
    following = next((module for module in behind if not isinstance(module, _SILENT)), None)
    return isinstance(following, NORMS)


def _between(giver: _Leaf, norms: Sequence[_Leaf], taker: _Leaf, normalised: bool) -> HiddenLayer:
    summed = frozenset[tuple[int, str]]() if normalised else frozenset({(taker.block, taker.path)})
    rows = tuple(Spot(leaf.block, Side(leaf.path)) for leaf in (giver, *norms))
    columns, units = (Spot(taker.block, Side(taker.path)),), giver.module.out_features
    return HiddenLayer(number=0, units=units, rows=rows, columns=columns, summed=summed)  # type: ignore[arg-type]
