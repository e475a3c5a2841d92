"""Putting tiles in the place of large layers of a model, and the layers back with what the tiles have learned."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import gcd
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from seqpart.device.pages import round_up
from seqpart.errors import DoesNotFit, ModelError, OptionError
from seqpart.model.inspection import is_listened_to
from seqpart.model.live_modules import modules_of
from seqpart.model.tiled_modules import EmbeddingTile, LinearTile, Tiled, TiledEmbedding, TiledLinear

T = TypeVar("T")

SIZES = (64 << 20, 16 << 20, 4 << 20)
"""Bytes of a tile's weight that are tried in turn where nothing fits."""
_MOST_TILES = 128
"""Of a layer: each is a block, with files of its own."""
_GRANULE = 64
"""Rows that kernels take at a time."""
_VECTOR = 32
"""Numbers that a fused optimizer steps at once (of bfloat16, with AVX-512). It rounds the last ones of a tensor otherwise,
which are fewer, so that no tile but the last may have such."""


def sizes_to_try(model: object) -> tuple[int, ...]:
    """Bytes of a tile's weight, one after the other, until a plan fits. The first is 0: no tiles."""
    largest = max((layer.weight.nbytes for layer in _tileable(model)), default=0)
    return 0, *(size for size in SIZES if size < largest)


def possible_tile(model: object, nbytes: int) -> int:
    """`nbytes`. Raises OptionError where tiles cannot be cut, because layers do not exist before they are needed."""
    if nbytes and _has_factories(model):
        raise OptionError(
            "--tile: this model is built block by block, by functions, as the models mlp and gpt of the command are, and only "
            "layers that exist can be cut into tiles. Leave it out, or give an nn.Module."
        )
    return nbytes


@dataclass(slots=True)
class Split:
    """A parameter, and the tiles of it."""

    whole: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    tiles: list[nn.Parameter]

    def join(self) -> None:
        """Let the parameter have the tiles' values, in its own memory where they still lie there."""
        first = self.tiles[0]
        if self.whole.is_meta or first.is_meta or not first.untyped_storage().nbytes():
            return
        if len({tile.untyped_storage()._cdata for tile in self.tiles}) == 1:
            self.whole.data = first.data.as_strided(self.shape, self.stride)
            for tile in self.tiles:  # who still has them would hold the memory, once the layer's weights are elsewhere
                tile.data = torch.empty(0, dtype=tile.dtype, device=tile.device)
            return
        whole, row = torch.empty(self.shape, dtype=first.dtype, device=first.device), 0
        for tile in self.tiles:  # page by page: the new memory grows as the old one goes
            whole[row : row + len(tile)].copy_(tile.data)
            row += len(tile)
            tile.data = torch.empty(0, dtype=tile.dtype, device=tile.device)
        self.whole.data = whole


class Tiling:
    """A context in which large layers of `model` are tiles of at most `nbytes` each; its value is the model to be trained.

    A list of modules becomes an nn.Sequential. nbytes 0: the model as it is. The weights of the model's own layers are empty
    inside, but for those on the meta device.
    """

    def __init__(self, model: object, nbytes: int) -> None:
        self._model, self._nbytes = model, nbytes
        self._splits: dict[int, Split] = {}
        """By the identity of the parameter: two layers may share one."""
        self._places: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []

    def __enter__(self) -> object:
        layers = _tileable(self._model, self._nbytes) if self._nbytes else []
        if not layers:
            return self._model
        model = self._model if isinstance(self._model, nn.Module) else nn.Sequential(*self._model)  # type: ignore[misc]
        tiled = {layer: self._tiled(layer) for layer in layers}
        for module in [*model.modules()]:
            for name, child in module._modules.items():
                if child in tiled:
                    self._places.append((module._modules, name, child))
                    module._modules[name] = tiled[child].train(child.training)
        for split in self._splits.values():
            if not split.whole.is_meta:
                split.whole.data = torch.empty(0, dtype=split.whole.dtype, device=split.whole.device)
        return model

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for modules, name, layer in self._places:
            modules[name] = layer
        for split in self._splits.values():
            split.join()
        self._places, self._splits = [], {}

    def _tiled(self, layer: nn.Linear | nn.Embedding) -> Tiled:
        rows = _rows(layer, self._nbytes)
        firsts = range(0, len(layer.weight), rows)
        assert isinstance(layer.weight, nn.Parameter)
        weights = self._split(layer.weight, rows)
        if isinstance(layer, nn.Linear):
            biases = [None] * len(weights) if layer.bias is None else self._split(layer.bias, rows)
            return TiledLinear([LinearTile(*pair) for pair in zip(weights, biases, strict=True)], self._nbytes)
        last = firsts[-1]
        return TiledEmbedding(
            [
                EmbeddingTile(tile, first, (first == 0, first == last), layer.padding_idx)
                for tile, first in zip(weights, firsts, strict=True)
            ],
            self._nbytes,
        )  # fmt: skip

    def _split(self, whole: nn.Parameter, rows: int) -> list[nn.Parameter]:
        if id(whole) not in self._splits:
            tiles = [piece_of(whole, part) for part in torch.split(whole.data, rows)]
            self._splits[id(whole)] = Split(whole, whole.shape, whole.stride(), tiles)
        return self._splits[id(whole)].tiles


def piece_of(whole: nn.Parameter, part: torch.Tensor) -> nn.Parameter:
    """A parameter with the attributes of the one that it is a part of: an optimizer's groups may be made by these."""
    piece = nn.Parameter(part, whole.requires_grad)
    vars(piece).update(vars(whole))
    return piece


def first_that_fits(stack: ExitStack, model: object, sizes: Sequence[int], work: Callable[[ExitStack, object], T]) -> T:
    """What `work` makes of the model, with tiles of the first of `sizes` where it does not raise DoesNotFit.

    `stack` takes over what it entered into its own, and lets the layers be whole again. Raises the last refusal.
    """
    refusal: DoesNotFit | None = None
    for size in sizes:
        with ExitStack() as own:
            tiled = own.enter_context(Tiling(model, size))
            try:
                found = work(own, tiled)
            except DoesNotFit as error:
                refusal = error.with_traceback(None)  # else its frames keep what was measured
                refusal.__context__ = refusal.__cause__ = None
            except ModelError:
                if refusal is None:
                    raise
                break  # in tiles it cannot be cut
            else:
                stack.enter_context(own.pop_all())
                return found
    assert refusal is not None
    raise refusal


def whole_names(model: nn.Module) -> dict[str, str]:
    """{name of a tile's parameter in the state_dict: that of the layer's}, of all tiles of a model in their order."""
    if (said := getattr(model, "wholes", None)) is not None:
        return dict(said)
    return {
        f"{path}.{number}.{leaf}": f"{path}.{leaf}"
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Tiled)
        for number, tile in module.named_children()
        for leaf, _ in tile.named_parameters()
    }


def tile_of(model: nn.Module) -> int:
    """The most bytes of a tile's weight in the model; 0: it has none."""
    return max((module.nbytes for module in model.modules() if isinstance(module, Tiled)), default=0)


def _has_factories(model: object) -> bool:
    return isinstance(model, list | tuple) and not all(isinstance(part, nn.Module) for part in model)


def _tileable(model: object, nbytes: int = 0) -> list[nn.Linear | nn.Embedding]:
    """Layers with a weight of more than `nbytes` that have nothing but what tiles can do as well, and are not the model."""
    if _has_factories(model):
        return []
    modules = [*modules_of(model)]
    shared = {id(own) for module in modules if not _may_be_tiled(module) for own in module._parameters.values()}
    return [
        module for module in modules
        if isinstance(module, nn.Linear | nn.Embedding) and _may_be_tiled(module) and module is not model
        and len(module.weight) > 1 and module.weight.nbytes > nbytes
        and not any(id(parameter) in shared for parameter in module.parameters())
    ]  # fmt: skip


def _may_be_tiled(module: nn.Module) -> bool:
    """An nn.Linear or nn.Embedding of the very type, with parameters of its own that lie row by row, and nobody listening."""
    if type(module) not in (nn.Linear, nn.Embedding) or not isinstance(module.weight, nn.Parameter):
        return False
    if is_listened_to(module):
        return False
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        return False
    return all(parameter.layout == torch.strided and parameter.is_contiguous() for parameter in module.parameters())


def _rows(layer: nn.Linear | nn.Embedding, nbytes: int) -> int:
    """Of a tile: as many as `nbytes` have, whole granules where that is possible, and tiles alike. Tiles of weight and bias
    have multiples of _VECTOR numbers, if that takes more than `nbytes` too."""
    weight = layer.weight
    step = _VECTOR if isinstance(layer, nn.Linear) and layer.bias is not None else _VECTOR // gcd(_VECTOR, weight[0].numel())
    most = max(step, nbytes // max(1, weight.nbytes // len(weight)) // step * step, -(-len(weight) // _MOST_TILES))
    count = -(-len(weight) // most)
    rows = round_up(-(-len(weight) // count), step)
    granules = round_up(rows, _GRANULE)
    return granules if granules <= most else rows
