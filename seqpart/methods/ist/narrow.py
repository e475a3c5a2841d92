"""Narrow copies of a block's module, with the rows and columns of its tensors that belong to a part."""

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from seqpart.device.device import keyed_seed
from seqpart.errors import ModelError, refusing
from seqpart.methods.ist.hidden import HiddenLayer, Spot
from seqpart.model.blocks import Block
from seqpart.model.tensors import tensors_of
from seqpart.profile.fake_mode import FakeMode


class PartialSum(nn.Module):
    """A linear layer over the units of one of `parts` parts: x (..., its units) -> (..., out).

    Its sum stands for that of all parts, so that the whole network's is their mean: ResIST's 1 / S of a residual, applied in
    the part instead, so that the whole network is the user's own, unchanged.
    """

    def __init__(self, linear: nn.Linear, parts: int) -> None:
        super().__init__()
        self.weight, self.bias, self.parts = linear.weight, linear.bias, parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x * self.parts, self.weight, self.bias)


class Placed(nn.Module):
    """A linear layer that has some of `width` neurons, and gives zeros for the others: x (..., in) -> (..., width)."""

    neurons: torch.Tensor

    def __init__(self, linear: nn.Linear, width: int, units: int) -> None:
        super().__init__()
        self.weight, self.bias, self.width = linear.weight, linear.bias, width
        self.register_buffer("neurons", torch.zeros(units, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y.new_zeros((*y.shape[:-1], self.width)).index_copy(-1, self.neurons, y)


Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


def groups_of(units: int, parts: int, group: int) -> int:
    """Returns the number of groups of `group` units, if that divides `units` and gives every part one; else `units`."""
    return units // group if units % group == 0 and units // group >= parts else units


def widths(units: int, parts: int, group: int) -> tuple[int, ...]:
    """Returns the units of each part: equal in every round, as even as groups allow; the first parts have one group more."""
    groups = groups_of(units, parts, group)
    each = units // groups
    return tuple(each * (groups // parts + (part < groups % parts)) for part in range(parts))


def index_sets(seed: int, round_: int, layer: int, units: int, parts: int, group: int) -> tuple[Ints, ...]:
    """Returns the units of each part, ascending: a partition of all of them."""
    groups = groups_of(units, parts, group)
    order = np.random.default_rng(keyed_seed(seed, "subnets", round_, layer)).permutation(groups)
    each, sets, first = units // groups, [], 0
    for width in widths(units, parts, group):
        own = np.sort(order[first : first + width // each])
        sets.append((own[:, None] * each + np.arange(each)).reshape(-1))
        first += len(own)
    return tuple(sets)


NEURONS = "neurons"
"""The tensor of a part that says which units it has: the whole network has none such."""
_WIDTHS = ("out_features", "num_features")


class Axis(NamedTuple):
    """One axis of a tensor: before x units x after places, the units those of hidden layer number `layer`."""

    layer: int
    units: int
    before: int
    after: int

    def places(self, units: Ints) -> Ints:
        """Returns the indices of `units` on it, such as (q, k, v) x heads x size."""
        whole = (np.arange(self.before)[:, None] * self.units + units)[:, :, None] * self.after + np.arange(self.after)
        return whole.reshape(-1)


class Cut(NamedTuple):
    """The axes along which a tensor, viewed as rows x columns, is divided among parts; None: not divided."""

    rows: Axis | None = None
    columns: Axis | None = None


def template(block: Block) -> nn.Module:
    """Returns the block's module on the meta device. Raises ModelError if it cannot be copied."""
    module, tensors = block.fake(FakeMode())
    own = tensors_of(module)
    memo: dict[int, object] = {id(tensor): _like(tensor, _on_meta(tensors[name])) for name, tensor in own.items()}
    with refusing(
        lambda error: ModelError(
            f"method ist trains copies of each block, and {block} cannot be copied: {type(error).__name__}: {error}. Let its "
            "module be one that copy.deepcopy takes."
        )
    ):
        return copy.deepcopy(module, memo)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns `values`, as a parameter with the attributes of `tensor` if that is one."""
    if not isinstance(tensor, nn.Parameter):
        return values
    parameter = nn.Parameter(values, tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def cuts_of(modules: Sequence[nn.Module], layers: Sequence[HiddenLayer]) -> list[dict[str, Cut]]:
    """Returns the cut tensors of each block, by name. Raises ModelError for tensors that are not contiguous."""
    cuts: list[dict[str, Cut]] = [{} for _ in modules]
    for layer in layers:
        for spot in layer.rows:
            for name, tensor in tensors_of(_at(modules, spot)).items():
                if tensor.ndim:
                    _note(cuts[spot.block], spot, name, rows=_axis(layer, spot, tensor.shape[0]))
        for spot in layer.columns:
            weight = _at(modules, spot).get_parameter("weight")
            _note(cuts[spot.block], spot, "weight", columns=_axis(layer, spot, weight.shape[1]))
    for number, own in enumerate(cuts):
        tensors = tensors_of(modules[number])
        if not all(tensors[name].is_contiguous() for name in own):
            raise ModelError(
                f"method ist cuts weights by rows, and those of block {number} do not lie row by row. Make them contiguous, or "
                "use --method auto."
            )
    return cuts


def _at(modules: Sequence[nn.Module], spot: Spot) -> nn.Module:
    return modules[spot.block].get_submodule(spot.side.path)


def _axis(layer: HiddenLayer, spot: Spot, length: int) -> Axis:
    axis = Axis(layer.number, layer.units, spot.side.before, spot.side.after)
    if axis.before * axis.units * axis.after != length:
        raise ModelError(
            f"block {spot.block} says that {spot.side.path or 'it'} has {axis.before} x {axis.units} x {axis.after} of a "
            f"hidden layer's units; it has {length}. Correct its hidden_layers()."
        )
    return axis


def _note(cuts: dict[str, Cut], spot: Spot, name: str, **axes: Axis) -> None:
    full = f"{spot.side.path}.{name}" if spot.side.path else name
    cuts[full] = cuts.get(full, Cut())._replace(**axes)


def narrowed(
    whole: nn.Module, number: int, layers: Sequence[HiddenLayer], cuts: Mapping[str, Cut], units: Sequence[int], parts: int
) -> nn.Module:
    """Returns a copy of the meta module `whole` for a part with `units` units of each hidden layer. Its tensors are zeros on
    the CPU, or fake ones under a FakeTensorMode."""
    memo = {id(tensor): _zeros(tensor, cuts.get(name, Cut()), units) for name, tensor in tensors_of(whole).items()}
    module: nn.Module = copy.deepcopy(whole, memo)
    for layer in layers if parts > 1 else ():
        _take_part(module, number, layer, units[layer.number])
        module = _replaced(module, number, layer, units[layer.number], parts)
    return module


def _zeros(tensor: torch.Tensor, cut: Cut, units: Sequence[int]) -> torch.Tensor:
    if cut == Cut():
        return _like(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_())
    shape = list(tensor.shape)
    for index, axis in enumerate(cut):
        if axis is not None:
            shape[index] = axis.before * units[axis.layer] * axis.after
    return _like(tensor, torch.zeros(shape, dtype=tensor.dtype))


def _take_part(module: nn.Module, number: int, layer: HiddenLayer, units: int) -> None:
    """Sets the modules' size attributes to the part's."""
    for spot in layer.rows:
        if spot.block == number:
            inner, width = module.get_submodule(spot.side.path), spot.side.before * units * spot.side.after
            for name, size in (*((name, width) for name in _WIDTHS), ("normalized_shape", (width,))):
                if hasattr(inner, name):
                    setattr(inner, name, size)
    for spot in layer.columns:
        if spot.block == number:
            setattr(module.get_submodule(spot.side.path), "in_features", spot.side.before * units * spot.side.after)  # noqa: B010
    for block, (path, before, after) in layer.counts:
        if block == number:
            place, _, name = path.rpartition(".")
            setattr(module.get_submodule(place), name, before * units * after)


def _replaced(module: nn.Module, number: int, layer: HiddenLayer, units: int, parts: int) -> nn.Module:
    """Replaces linear layers whose sums are not normalised with PartialSum, and those that keep their width with Placed."""
    for block, path in layer.summed:
        if block == number:
            linear = module.get_submodule(path)
            assert isinstance(linear, nn.Linear)
            module = _put(module, path, PartialSum(linear, parts))
    for spot in layer.rows if layer.placed else ():
        if spot.block == number:
            linear = module.get_submodule(spot.side.path)
            assert isinstance(linear, nn.Linear)
            module = _put(module, spot.side.path, Placed(linear, layer.units, units))
    return module


def _put(module: nn.Module, path: str, other: nn.Module) -> nn.Module:
    if not path:
        return other
    place, _, name = path.rpartition(".")
    module.get_submodule(place)._modules[name] = other
    return module
