"""An embedding and a linear layer whose weight is several parameters, of consecutive rows each."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class Tiled(nn.Module):
    """What stands in the place of a layer: its children 0, 1, ... are the tiles, each with a parameter `weight` of its rows."""

    def __init__(self, tiles: Sequence[nn.Module], nbytes: int) -> None:
        super().__init__()
        for number, tile in enumerate(tiles):
            self.add_module(str(number), tile)
        self.nbytes = nbytes
        """A tile's weight has at most so many."""


class TiledEmbedding(Tiled):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: integers of any shape. The same bits as of nn.Embedding, gradients too: each row has one tile."""
        found: torch.Tensor | None = None
        for tile in self.children():
            found = tile(ids, found)
        assert found is not None
        return found


class EmbeddingTile(nn.Module):
    """Rows of an embedding from `first` on. ends: whether it has the first row of all, and the last, so that an id that no tile
    has is refused by one of them."""

    def __init__(self, weight: nn.Parameter, first: int, ends: tuple[bool, bool], padding: int | None) -> None:
        super().__init__()
        self.weight = weight
        rows = len(weight)
        self._first, self._last = first, rows - 1
        self._clamped = None if ends[0] else 0, None if ends[1] else rows - 1
        self._padding = padding - first if padding is not None and first <= padding < first + rows else None

    def forward(self, ids: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor:
        """Of ids in this tile its rows, of others what was `found` by earlier tiles, or any row."""
        here = ids - self._first
        least, most = self._clamped
        row = here if least is None and most is None else here.clamp(least, most)
        rows = F.embedding(row, self.weight, self._padding)
        if found is None:
            return rows
        inside = (here >= 0) & (here <= self._last)
        return torch.where(inside.unsqueeze(-1), rows, found)


class TiledLinear(Tiled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., in) -> (..., out). The gradient of x is a sum over tiles, which rounds otherwise than over the whole."""
        return torch.cat([tile(x) for tile in self.children()], dim=-1)


class LinearTile(nn.Module):
    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
