"""A model that ends in separable layers, as common layers and one narrow network for each score.

    image -> common layers -> +- group 0 -> score 0 -+
                              +- group 1 -> score 1 -+-> scores (rows, classes)
                              +- ...                -+

P. Raynaud, D. Orban, J. Bigeon, "Partially-separable loss to parallelize partitioned neural network training" (2023), section
5.3. A score has its groups of the separable layers, and the rows that feed them of the convolution or linear layer before
these: of PSNet for CIFAR-10 three kernels of the second convolution. Everything is cut by rows, as tiles are.
"""

import itertools
from collections.abc import Sequence
from types import TracebackType

import torch
import torch.nn.functional as F
from torch import nn

from seqpart.device.device import Device
from seqpart.errors import ModelError
from seqpart.model.blocks import as_chain
from seqpart.model.inspection import ACTIVATIONS, is_listened_to
from seqpart.model.separable import SeparableLinear
from seqpart.model.tiled_modules import LinearTile
from seqpart.model.tiling import Split, piece_of

_BY_CHANNEL = (nn.AvgPool2d, nn.MaxPool2d, nn.Flatten)
"""What leaves a convolution's channels in their order, one after the other."""
_CUT = (nn.Conv2d, nn.Linear, SeparableLinear)
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)


class ConvolutionTile(nn.Module):
    """Some kernels of a convolution."""

    def __init__(self, layer: nn.Conv2d, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        assert isinstance(layer.padding, tuple)
        self._how = layer.stride, layer.padding, layer.dilation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.weight, self.bias, *self._how)


class Score(nn.Module):
    """What one score depends on alone: (rows, ...) of the common layers to (rows, 1)."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


class SideBySide(nn.Module):
    """Scores (rows, 1) each to (rows, classes)."""

    def forward(self, *scores: torch.Tensor) -> torch.Tensor:
        return torch.cat(scores, 1)


class Common(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Separated(nn.Module):
    """wholes: {name of a tensor here: what the model calls the one that it is, or is rows of}."""

    def __init__(self, common: Sequence[nn.Module], scores: Sequence[Score]) -> None:
        super().__init__()
        self.common, self.scores, self.joined = Common(common), nn.ModuleList(scores), SideBySide()
        self.wholes: dict[str, str] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        common = self.common(x)
        found: torch.Tensor = self.joined(*(score(common) for score in self.scores))
        return found


class Separation:
    """A context in which `model`, a list of blocks or of factories, is separated; its value is what is to be trained.

    Its layers are the model's own, whose weights are empty inside where they are cut. Factories are called: then the model is
    alive as if it had been given so. Raises ModelError, in words, for a model that cannot be separated.
    """

    def __init__(self, model: object, device: Device, seed: int) -> None:
        self._model, self._device, self._seed = model, device, seed
        self._splits: list[Split] = []

    def __enter__(self) -> Separated:
        if isinstance(self._model, nn.Module) and not isinstance(self._model, nn.Sequential):
            raise _unseparable(f"a {type(self._model).__name__} has a forward of its own")
        layers: list[tuple[str, nn.Module]] = []
        for block in as_chain(self._model):
            module = block.alive if block.alive is not None else block.build(self._device, self._seed)
            layers += _flat(block.name, module)
        _refuse_others(layers)
        first = _first_of_head(layers)
        groups = next(layer for _, layer in layers[first:] if isinstance(layer, SeparableLinear)).groups
        cut = [self._cut(layer, groups) for _, layer in layers[first:]]
        model = Separated([layer for _, layer in layers[:first]], [Score(own) for own in zip(*cut, strict=True)])
        model.wholes = {
            f"common.{number}.{leaf}": f"{name}.{leaf}"
            for number, (name, layer) in enumerate(layers[:first]) for leaf, _ in layer.named_parameters()
        } | {
            f"scores.{score}.layers.{number}.{leaf}": f"{name}.{leaf}"
            for score in range(groups) for number, (name, layer) in enumerate(layers[first:])
            for leaf, _ in layer.named_parameters()
        }  # fmt: skip
        for split in self._splits:
            split.whole.data = torch.empty(0, dtype=split.whole.dtype, device=split.whole.device)
        return model

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for split in self._splits:
            split.join()
        self._splits = []

    def _cut(self, layer: nn.Module, groups: int) -> list[nn.Module]:
        """One for each score; layers without weights are used by all."""
        if not isinstance(layer, _CUT):
            return [layer] * groups
        weights = self._split(layer.weight, groups)
        biases: Sequence[nn.Parameter | None] = [None] * groups if layer.bias is None else self._split(layer.bias, groups)
        if isinstance(layer, nn.Conv2d):
            return [ConvolutionTile(layer, *pair) for pair in zip(weights, biases, strict=True)]
        return [LinearTile(*pair) for pair in zip(weights, biases, strict=True)]

    def _split(self, whole: torch.Tensor, groups: int) -> list[nn.Parameter]:
        assert isinstance(whole, nn.Parameter)
        parts = [piece_of(whole, part) for part in torch.split(whole.data, len(whole) // groups)]
        self._splits.append(Split(whole, whole.shape, whole.stride(), parts))
        return parts


def _flat(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, layer) of an nn.Sequential, and of those in it."""
    if type(module) is not nn.Sequential or is_listened_to(module):
        return [(name, module)]
    return list(itertools.chain.from_iterable(_flat(f"{name}.{key}", part) for key, part in module._modules.items() if part))


def _first_of_head(layers: Sequence[tuple[str, nn.Module]]) -> int:
    """The first layer that is cut: from there on each score has rows of its own."""
    ends = [number for number, (_, layer) in enumerate(layers) if isinstance(layer, SeparableLinear)]
    if not ends or ends[-1] != len(layers) - 1:
        name, last = layers[-1]
        raise _unseparable(f"its last layer, {name}, is a {type(last).__name__}")
    last = layers[-1][1]
    assert isinstance(last, SeparableLinear)
    groups, first = last.groups, len(layers) - 1
    if last.out_features != groups or groups < 2:
        raise _unseparable(f"its last layer has {last.out_features} outputs in {groups} groups, and each score is a group")
    while first and (isinstance(layers[first - 1][1], (SeparableLinear, *ACTIVATIONS, *_BY_CHANNEL))):
        first -= 1
        layer = layers[first][1]
        if isinstance(layer, SeparableLinear) and layer.groups != groups:
            raise _unseparable(f"layer {layers[first][0]} has {layer.groups} groups, and the last one {groups}")
    name, feeds = layers[first - 1] if first else ("", None)
    rows = feeds.out_channels if isinstance(feeds, nn.Conv2d) else feeds.out_features if isinstance(feeds, nn.Linear) else 0
    plain = not isinstance(feeds, nn.Conv2d) or (
        feeds.groups == 1 and isinstance(feeds.padding, tuple) and feeds.padding_mode == "zeros"
    )
    if not rows or rows % groups or not plain or first < 2:
        raise _unseparable(
            f"before its separable layers there is {f'layer {name}' if name else 'nothing'}, and it must be a plain nn.Conv2d "
            f"or nn.Linear with outputs in {groups} equal groups, with a layer before it that all scores share"
        )
    for name, layer in layers[first - 1 :]:
        if type(layer) not in (*_CUT, *ACTIVATIONS, *_BY_CHANNEL) or is_listened_to(layer):
            raise _unseparable(f"layer {name} is a {type(layer).__name__} with hooks, or of a kind that is not cut")
    _refuse_disorder(feeds, layers[first:])
    return first - 1


def _refuse_disorder(feeds: nn.Module | None, behind: Sequence[tuple[str, nn.Module]]) -> None:
    """Groups are rows of what feeds them while a convolution's channels, or a linear layer's outputs, stay in their order."""
    moving = [(name, layer) for name, layer in behind if isinstance(layer, _BY_CHANNEL)]
    flattens = [(layer.start_dim, layer.end_dim) for _, layer in moving if isinstance(layer, nn.Flatten)]
    if isinstance(feeds, nn.Linear) and moving:
        raise _unseparable(f"layer {moving[0][0]} moves the outputs of the linear layer before it")
    if isinstance(feeds, nn.Conv2d) and flattens != [(1, -1)]:
        raise _unseparable("between the convolution that feeds its separable layers and these there is no nn.Flatten(1)")


def _refuse_others(layers: Sequence[tuple[str, nn.Module]]) -> None:
    """What would not be the same in every pair of scores, or has a second place."""
    for name, layer in layers:
        if any(True for _ in layer.buffers()):
            raise _unseparable(f"layer {name} has buffers, and would change them once for each pair of scores")
        if any(isinstance(part, _RANDOM) for part in layer.modules()):
            raise _unseparable(f"layer {name} is random, and would be so once for each pair of scores")
    owned = [parameter for _, layer in layers for parameter in layer.parameters()]
    if len({id(parameter) for parameter in owned}) < len(owned):
        raise _unseparable("two of its layers share a parameter")


def _unseparable(why: str) -> ModelError:
    return ModelError(
        f"--method psl trains a list of blocks, of factories, or an nn.Sequential, that ends in seqpart.model.SeparableLinear "
        f"layers with one group for each class (as --model psnet): {why}. Use --method auto --loss psl, which trains any model."
    )


def starts_of(model: object, blocks: int) -> tuple[int, ...] | None:
    """First blocks of the partitions of a separated model's chain: common, each score, side by side. None of other models."""
    if not isinstance(model, Separated):
        return None
    return (0, *range(blocks - len(model.scores) - 1, blocks))
