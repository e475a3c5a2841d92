"""Convolutions of many kinds, and blocks whose memory is inside one operation."""

import functools
import itertools
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.architectures.rows import CLASSES
from seqpart.model import SeparableLinear
from seqpart.zoo import models as networks

Blocks = list[Callable[[], nn.Module]]
WIDTH = 256


def _linear(width: int, outputs: int = CLASSES) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(width, outputs)


class Added(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.inner(x)
        return y


def convmixer() -> Blocks:
    def layer() -> nn.Module:
        depthwise = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 7, groups=WIDTH, padding=3), nn.GELU(), nn.BatchNorm2d(WIDTH))
        return nn.Sequential(Added(depthwise), nn.Conv2d(WIDTH, WIDTH, 1), nn.GELU(), nn.BatchNorm2d(WIDTH))

    return [lambda: nn.Conv2d(3, WIDTH, 4, stride=4), *[layer] * 6, lambda: _pooled(WIDTH)]


def _pooled(width: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


class UNet(nn.Module):
    """One block: four levels down and up again, with skips."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        widths = [3, width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(self._pair(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(widths[1:]))
        self.join = nn.ModuleList(self._pair(2 * a, a) for a in widths[1:-1])

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Module:
        first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        return nn.Sequential(first, nn.BatchNorm2d(outputs), nn.ReLU(), second, nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for number, pair in enumerate(self.down):
            x = pair(x if number == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for up, join, skip in zip(reversed(self.up), reversed(self.join), reversed(skips[:-1]), strict=True):
            x = join(torch.cat([skip, up(x)], dim=1))
        return x


def unet() -> Blocks:
    return [UNet, lambda: _pooled(24)]


def transposed7() -> Blocks:
    """Down by one convolution, then wide transposed ones, whose columns are many times their outputs."""
    layer = functools.partial(nn.ConvTranspose2d, 32, 32, 7, padding=3)
    return [lambda: nn.Conv2d(3, 32, 4, stride=2, padding=1), *[layer] * 4, lambda: _pooled(32)]


def generator() -> Blocks:
    """DCGAN's, from images of 64 x 64 by way of 4 x 4."""
    widths = (512, 256, 128, 64)

    def up(pair: tuple[int, int]) -> Callable[[], nn.Module]:
        a, b = pair
        return lambda: nn.Sequential(nn.ConvTranspose2d(a, b, 4, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())

    return [lambda: nn.Conv2d(3, 512, 16, stride=16), *map(up, itertools.pairwise(widths)), lambda: _pooled(64)]


def dilated() -> Blocks:
    """WaveNet-like convolutions over time, dilated ever more."""

    def layer(rate: int) -> Callable[[], nn.Module]:
        return lambda: Added(nn.Sequential(nn.Conv1d(128, 128, 3, padding=rate, dilation=rate), nn.GELU(), nn.BatchNorm1d(128)))

    tail = nn.Sequential
    return [
        lambda: nn.Conv1d(16, 128, 3, padding=1), *(layer(2**number) for number in range(7)),
        lambda: tail(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, CLASSES)),
    ]  # fmt: skip


def volumes() -> Blocks:
    def layer(inputs: int, outputs: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1), nn.BatchNorm3d(outputs), nn.ReLU())

    head = nn.Sequential
    return [
        layer(1, 16), layer(16, 32), lambda: nn.MaxPool3d(2), layer(32, 64),
        lambda: head(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(64, CLASSES)),
    ]  # fmt: skip


class Turned(nn.Module):
    """A product with the exponential of a skew matrix: an orthogonal layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ torch.matrix_exp(self.weight - self.weight.mT))


def orthogonal() -> Blocks:
    return [lambda: nn.Linear(64, 512), *[lambda: Turned(512)] * 4, _linear(512)]


class Bank(nn.Module):
    """Experts that all see every row, weighed by a gate."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.weights = nn.Parameter(torch.randn(experts, width, width) / math.sqrt(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.einsum("bd,kde->bke", x, self.weights)
        return x + (F.softmax(self.gate(x), dim=-1).unsqueeze(-1) * F.gelu(found)).sum(1)


def experts() -> Blocks:
    return [lambda: nn.Linear(64, 512), *[lambda: Bank(512, 8)] * 4, _linear(512)]


def psnet() -> Blocks:
    return networks.psnet((3, 64, 64), CLASSES)


def psnet_wide() -> Blocks:
    """Scores of which each has many weights."""
    groups, inputs = CLASSES, 3 * CLASSES * 13 * 13
    return [
        *networks.psnet((3, 64, 64), CLASSES)[:2],
        lambda: nn.Sequential(SeparableLinear(inputs, 1024 * groups, groups), nn.ReLU()),
        lambda: nn.Sequential(SeparableLinear(1024 * groups, 512 * groups, groups), nn.ReLU()),
        lambda: SeparableLinear(512 * groups, groups, groups),
    ]
