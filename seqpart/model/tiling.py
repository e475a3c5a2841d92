"""Replaces large layers of a model by tiles, and puts the layers back with the values that the tiles have learned."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import gcd
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from seqpart.device.device import Device
from seqpart.device.pages import round_up
from seqpart.errors import DoesNotFit, ModelError, OptionError
from seqpart.model.blocks import as_chain
from seqpart.model.inspection import ACTIVATIONS, is_listened_to
from seqpart.model.live_modules import modules_of, replaced
from seqpart.model.losses import SeparableLinear
from seqpart.model.tensors import twin_of


class Tiled(nn.Module):
    """Replacement of a layer: its children 0, 1, ... are the tiles, each with a parameter `weight` of its rows. Each adds its
    part to what those before it found."""

    def __init__(self, tiles: Sequence[nn.Module], nbytes: int) -> None:
        super().__init__()
        for number, tile in enumerate(tiles):
            self.add_module(str(number), tile)
        self.nbytes = nbytes
        """Most bytes of a tile's weight."""

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor | None = None
        for tile in self.children():
            found = tile(*given, found)
        assert found is not None
        return found


class EmbeddingTile(nn.Module):
    """Rows of an embedding from `first` on, for ids of any shape. The same bits as nn.Embedding, gradients too: each row is in
    one tile. ends: True if it has the first row of all, and the last; then it refuses ids below,
    or above, so that an id that no tile has is refused."""

    def __init__(self, weight: nn.Parameter, first: int, ends: tuple[bool, bool], padding: int | None) -> None:
        super().__init__()
        self.weight = weight
        rows = len(weight)
        self._first, self._last = first, rows - 1
        self._clamped = None if ends[0] else 0, None if ends[1] else rows - 1
        self._padding = padding - first if padding is not None and first <= padding < first + rows else None

    def forward(self, ids: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor:
        """Rows of the ids in this tile; for others the rows `found` by earlier tiles, or any row."""
        here = ids - self._first
        least, most = self._clamped
        row = here if least is None and most is None else here.clamp(least, most)
        rows = F.embedding(row, self.weight, self._padding)
        if found is None:
            return rows
        inside = (here >= 0) & (here <= self._last)
        return torch.where(inside.unsqueeze(-1), rows, found)


class TiledLinear(Tiled):
    """Maps (..., in) to (..., out). The gradient of x is a sum over tiles, which rounds differently from a layer's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.cat([tile(x) for tile in self.children()], dim=-1)


class LinearTile(nn.Module):
    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class TiledExperts(Tiled):
    """Maps tokens (n, width), their experts and the shares of these, (n, k) each, to the sums of the experts' outputs.

    Sums of more than two experts, and the gradient of the tokens, are added tile by tile, which may round differently.
    """


class _ExpertsTile(nn.Module):
    """Some experts of a layer, as a subclass of the layer's own class: it computes as one rank of expert parallelism does, and
    an expert of another tile has the number that stands for none there."""

    _first: int
    num_experts: int

    def forward(
        self, hidden: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor, found: torch.Tensor | None
    ) -> torch.Tensor:
        local = experts - self._first
        here = (local >= 0) & (local < self.num_experts)
        part: torch.Tensor = super().forward(hidden, local.where(here, self.num_experts), shares.where(here, 0))
        if not here.any():  # then a layer of all experts has gradients of zeros for these, which an optimizer uses
            part = _Unused.apply(part, *self.parameters())
        return part if found is None else found + part


class _Unused(torch.autograd.Function):
    """Returns its first input, and gives the others gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], *map(torch.zeros_like, ctx.saved_tensors)


@functools.cache
def _tile_class(kind: type) -> type[nn.Module]:
    return type(f"{kind.__name__}Tile", (_ExpertsTile, kind), {})


def _experts_tile(layer: nn.Module, pieces: dict[str, nn.Parameter], first: int) -> nn.Module:
    """A tile of `layer`, whose other attributes and modules it shares: a layer of transformers with experts from `first` on."""
    tile = copy.copy(layer)
    tile.__class__ = _tile_class(type(layer))  # type: ignore[arg-type]
    tile._parameters, tile._modules = dict(pieces), dict(layer._modules)
    tile._first, tile.num_experts, tile._is_expert_parallel = first, len(next(iter(pieces.values()))), True  # type: ignore[assignment]
    return tile


T = TypeVar("T")

SIZES = (64 << 20, 16 << 20, 4 << 20)
"""Most bytes of a tile's weight, tried in turn where nothing fits."""
_MOST_TILES = 128
"""Most tiles of a layer: each is a block, with files of its own."""
_GRANULE = 64
"""Rows that kernels process at a time."""
_VECTOR = 32
"""Numbers that a fused optimizer processes at once (bfloat16 with AVX-512). It rounds an incomplete last group of a tensor
differently, so no tile but the last may have one."""


def sizes_to_try(model: object) -> tuple[int, ...]:
    """Sizes in bytes of a tile's weight, to be tried in turn until a plan fits. The first is 0: no tiles."""
    largest = max(map(_nbytes, _tileable(model)), default=0)
    return 0, *(size for size in SIZES if size < largest)


def possible_tile(model: object, nbytes: int) -> int:
    """Returns `nbytes`. Raises OptionError where tiles cannot be cut, because layers do not exist before they are needed."""
    if nbytes and _has_factories(model):
        raise OptionError(
            "--tile: this model is built block by block, by functions, as the models mlp and gpt of the command are, and only "
            "layers that exist can be cut into tiles. Leave it out, or give an nn.Module."
        )
    return nbytes


@dataclass(slots=True)
class Split:
    whole: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    tiles: list[nn.Parameter]

    def join(self) -> None:
        """Gives the parameter the tiles' values, in place if they still lie in its own memory."""
        first = self.tiles[0]
        if self.whole.is_meta or first.is_meta or not first.untyped_storage().nbytes():
            return
        if len({tile.untyped_storage()._cdata for tile in self.tiles}) == 1:
            self.whole.data = first.data.as_strided(self.shape, self.stride)
            for tile in self.tiles:  # a reference to one would keep the memory alive, once the layer's weights are elsewhere
                tile.data = torch.empty(0, dtype=tile.dtype, device=tile.device)
            return
        whole, row = torch.empty(self.shape, dtype=first.dtype, device=first.device), 0
        for tile in self.tiles:  # page by page: the new memory grows as the old one goes
            whole[row : row + len(tile)].copy_(tile.data)
            row += len(tile)
            tile.data = torch.empty(0, dtype=tile.dtype, device=tile.device)
        self.whole.data = whole


class _Splits:
    """Parameters that are cut into tiles, and empty inside the context. Two layers may share one."""

    def __init__(self) -> None:
        self._of: dict[int, Split] = {}

    def cut(self, whole: torch.Tensor, rows: int) -> list[nn.Parameter]:
        """Returns the tiles of a parameter, each of so many rows."""
        assert isinstance(whole, nn.Parameter)
        if id(whole) not in self._of:
            tiles = [twin_of(whole, part, whole.requires_grad) for part in torch.split(whole.data, rows)]
            self._of[id(whole)] = Split(whole, whole.shape, whole.stride(), tiles)
        return self._of[id(whole)].tiles

    def pairs(self, layer: Any, rows: int) -> Iterator[tuple[nn.Parameter, nn.Parameter | None]]:
        """Returns the tiles of a layer's weight, each with that of its bias."""
        weights = self.cut(layer.weight, rows)
        return zip(weights, [None] * len(weights) if layer.bias is None else self.cut(layer.bias, rows), strict=True)

    def __enter__(self) -> None:
        for whole in (split.whole for split in self._of.values()):
            if not whole.is_meta:
                whole.data = torch.empty(0, dtype=whole.dtype, device=whole.device)

    def __exit__(self, *_: object) -> None:
        for split in self._of.values():
            split.join()


@contextmanager
def tiling(model: object, nbytes: int) -> Iterator[object]:
    """A context in which large layers of `model` are replaced by tiles of at most `nbytes`; its value is the model to train.

    A list of modules becomes an nn.Sequential. nbytes 0: the model as it is. The weights of the model's own layers are empty
    inside, except those on the meta device.
    """
    layers = _tileable(model, nbytes) if nbytes else []
    if not layers:
        yield model
        return
    whole = model if isinstance(model, nn.Module) else nn.Sequential(*model)  # type: ignore[misc]
    splits = _Splits()
    tiles = {layer: _tiled(layer, nbytes, splits).train(layer.training) for layer in layers}
    with splits, replaced(whole, tiles):
        yield whole


def _tiled(layer: nn.Module, nbytes: int, splits: _Splits) -> Tiled:
    rows = _rows(layer, nbytes)
    if _is_experts(layer):
        pieces = {name: splits.cut(parameter, rows) for name, parameter in layer.named_parameters()}
        count = len(next(iter(pieces.values())))
        every = [{name: own[number] for name, own in pieces.items()} for number in range(count)]
        return TiledExperts([_experts_tile(layer, own, n * rows) for n, own in enumerate(every)], nbytes)
    if isinstance(layer, nn.Linear):
        return TiledLinear([LinearTile(*pair) for pair in splits.pairs(layer, rows)], nbytes)
    assert isinstance(layer, nn.Embedding)
    firsts = range(0, len(layer.weight), rows)
    return Tiled(
        [
            EmbeddingTile(tile, first, (first == 0, first == firsts[-1]), layer.padding_idx)
            for tile, first in zip(splits.cut(layer.weight, rows), firsts, strict=True)
        ],
        nbytes,
    )


def first_that_fits(
    stack: ExitStack, model: object, ways: Sequence[tuple[int, int | None]], work: Callable[[ExitStack, object, int | None], T]
) -> T:
    """Returns what `work` returns in the first of `ways` in which it does not raise DoesNotFit.

    ways: (tile size, chunks of the loss, see `Inputs`). work: gets a stack, the model in tiles, and the chunks. `stack` takes
    over the contexts that `work` entered, and restores the layers when it closes. Raises the last refusal.
    """
    refusal: DoesNotFit | None = None
    for size, chunks in ways:
        with ExitStack() as own:
            tiled = own.enter_context(tiling(model, size))
            try:
                found = work(own, tiled, chunks)
            except DoesNotFit as error:
                refusal = error.with_traceback(None)  # else its frames keep what was measured
                refusal.__context__ = refusal.__cause__ = None
            except ModelError:
                if refusal is None:
                    raise  # else the model cannot be divided in this way
            else:
                stack.enter_context(own.pop_all())
                return found
    assert refusal is not None
    raise refusal


def whole_names(model: nn.Module) -> dict[str, str]:
    """{name of a tile's parameter in the state_dict: name of the layer's parameter}, for all tiles of a model in order."""
    if (known := getattr(model, "wholes", None)) is not None:
        return dict(known)
    return {
        f"{path}.{number}.{leaf}": f"{path}.{leaf}"
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Tiled)
        for number, tile in module.named_children()
        for leaf, _ in tile.named_parameters()
    }


def tile_of(model: nn.Module) -> int:
    """Most bytes of a tile's weight in the model; 0: it has no tiles."""
    return max((module.nbytes for module in model.modules() if isinstance(module, Tiled)), default=0)


def _has_factories(model: object) -> bool:
    return isinstance(model, list | tuple) and not all(isinstance(part, nn.Module) for part in model)


def _is_experts(module: nn.Module) -> bool:
    """True for a layer of transformers that has the weights of all experts in each of its parameters, and that can run as one
    rank of expert parallelism."""
    count = getattr(module, "num_experts", None)
    return isinstance(count, int) and hasattr(module, "_is_expert_parallel") and not any(
        parameter.ndim < 2 or len(parameter) != count or "." in name for name, parameter in module.named_parameters()
    )  # fmt: skip


def _nbytes(layer: nn.Module) -> int:
    """Bytes that are divided by the bytes of a tile: a layer's weight, or all of its experts."""
    return sum(p.nbytes for p in layer.parameters()) if _is_experts(layer) else layer.get_parameter("weight").nbytes


def _tileable(model: object, nbytes: int = 0) -> list[nn.Module]:
    """Layers with a weight of more than `nbytes` that tiles can replace, and that are not the model itself."""
    if _has_factories(model):
        return []
    modules = [*modules_of(model)]
    shared = {id(own) for module in modules if not _may_be_tiled(module) for own in module._parameters.values()}
    return [
        module for module in modules
        if _may_be_tiled(module) and module is not model
        and len(next(module.parameters())) > 1 and _nbytes(module) > nbytes
        and not any(id(parameter) in shared for parameter in module.parameters())
    ]  # fmt: skip


def _may_be_tiled(module: nn.Module) -> bool:
    """True for an nn.Linear or nn.Embedding (no subclass), or experts of transformers, with contiguous parameters and without
    hooks or special options."""
    plain = type(module) in (nn.Linear, nn.Embedding) and isinstance(module.weight, nn.Parameter)
    if not plain and not _is_experts(module):
        return False
    if is_listened_to(module):
        return False
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        return False
    return all(parameter.layout == torch.strided and parameter.is_contiguous() for parameter in module.parameters())


def _rows(layer: nn.Module, nbytes: int) -> int:
    """Rows of a tile, or experts: as many as fit in `nbytes`, in whole granules if possible, and equal in all tiles. Tiles of
    each parameter have multiples of _VECTOR numbers, even if that takes more than `nbytes`."""
    every, total = list(layer.parameters()), len(next(layer.parameters()))
    step = max(_VECTOR // gcd(_VECTOR, parameter[0].numel()) for parameter in every)
    most = max(step, nbytes // max(1, _nbytes(layer) // total) // step * step, -(-total // _MOST_TILES))
    count = -(-total // most)
    rows = round_up(-(-total // count), step)
    granules = round_up(rows, _GRANULE)
    return granules if granules <= most else rows


_BY_CHANNEL = (nn.AvgPool2d, nn.MaxPool2d, nn.Flatten)
"""Layers that keep a convolution's channels in their order, one after the other."""
_CUT = (nn.Conv2d, nn.Linear, SeparableLinear)
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)


class ConvolutionTile(nn.Module):
    def __init__(self, layer: nn.Conv2d, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        assert isinstance(layer.padding, tuple)
        self._how = layer.stride, layer.padding, layer.dilation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.weight, self.bias, *self._how)


class Score(nn.Module):
    """The layers that one score alone depends on: outputs (rows, ...) of the common layers to (rows, 1)."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


class SideBySide(nn.Module):
    """Concatenates scores of shape (rows, 1) to (rows, classes)."""

    def forward(self, *scores: torch.Tensor) -> torch.Tensor:
        return torch.cat(scores, 1)


class Separated(nn.Module):
    """A separated model: common layers, then one `Score` per class. wholes: {name of a tensor here: name in the original model
    of the tensor that it is, or is rows of}."""

    def __init__(self, common: Sequence[nn.Module], scores: Sequence[Score]) -> None:
        super().__init__()
        self.common, self.scores, self.joined = nn.Sequential(*common), nn.ModuleList(scores), SideBySide()
        self.wholes: dict[str, str] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        common = self.common(x)
        found: torch.Tensor = self.joined(*(score(common) for score in self.scores))
        return found


@contextmanager
def separating(model: object, device: Device, seed: int) -> Iterator[Separated]:
    """A context in which `model`, a list of blocks or of factories, is separated; its value is the model to train.

    Its layers are the model's own, whose weights are empty inside where they are cut. Factories are called: then the model is
    alive as if it had been given so. Raises ModelError for a model that cannot be separated, and says why.
    """
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential):
        raise _unseparable(f"a {type(model).__name__} has a forward of its own")
    layers: list[tuple[str, nn.Module]] = []
    for block in as_chain(model):
        layers += _flat(block.name, block.alive if block.alive is not None else block.build(device, seed))
    _refuse_others(layers)
    first = _first_of_head(layers)
    groups = next(layer for _, layer in layers[first:] if isinstance(layer, SeparableLinear)).groups
    splits = _Splits()
    cut = [_cut(layer, groups, splits) for _, layer in layers[first:]]
    found = Separated([layer for _, layer in layers[:first]], [Score(own) for own in zip(*cut, strict=True)])
    found.wholes = {
        f"common.{number}.{leaf}": f"{name}.{leaf}"
        for number, (name, layer) in enumerate(layers[:first]) for leaf, _ in layer.named_parameters()
    } | {
        f"scores.{score}.layers.{number}.{leaf}": f"{name}.{leaf}"
        for score in range(groups) for number, (name, layer) in enumerate(layers[first:])
        for leaf, _ in layer.named_parameters()
    }  # fmt: skip
    with splits:
        yield found


def _cut(layer: nn.Module, groups: int, splits: _Splits) -> list[nn.Module]:
    """Cuts a layer into one for each score; layers without weights are shared by all."""
    if not isinstance(layer, _CUT):
        return [layer] * groups
    pairs = splits.pairs(layer, len(layer.weight) // groups)
    return [ConvolutionTile(layer, *pair) if isinstance(layer, nn.Conv2d) else LinearTile(*pair) for pair in pairs]


def _flat(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the (name, layer) pairs of an nn.Sequential, with nested ones flattened."""
    if type(module) is not nn.Sequential or is_listened_to(module):
        return [(name, module)]
    return list(itertools.chain.from_iterable(_flat(f"{name}.{key}", part) for key, part in module._modules.items() if part))


def _first_of_head(layers: Sequence[tuple[str, nn.Module]]) -> int:
    """Number of the first layer that is cut: from there on each score has rows of its own."""
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
    """Raises ModelError unless outputs of `feeds` stay in order up to the groups: only then is a group rows of its weight."""
    moving = [(name, layer) for name, layer in behind if isinstance(layer, _BY_CHANNEL)]
    flattens = [(layer.start_dim, layer.end_dim) for _, layer in moving if isinstance(layer, nn.Flatten)]
    if isinstance(feeds, nn.Linear) and moving:
        raise _unseparable(f"layer {moving[0][0]} moves the outputs of the linear layer before it")
    if isinstance(feeds, nn.Conv2d) and flattens != [(1, -1)]:
        raise _unseparable("there is no nn.Flatten(1) between its convolution and its separable layers")


def _refuse_others(layers: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises ModelError for layers that would differ between pairs of scores, and for shared parameters."""
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
    """First blocks of the partitions of a separated model's chain: common, each score, joined. None for other models."""
    if not isinstance(model, Separated):
        return None
    return (0, *range(blocks - len(model.scores) - 1, blocks))
