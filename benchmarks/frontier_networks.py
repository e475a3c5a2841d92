"""The networks of benchmarks/frontier.py by name, and their rows. Without seqpart, which would set up our allocator.

S, L  the residual MLPs of benchmarks/streamed_networks.py on digits: 1.6 GB and 6.4 GB of training state
T     the GPT of benchmarks/peers/networks.py, 2.4 GB of training state; its characters are the pixels of digits, row by row
R     ResNet-50 with BatchNorm on digits of 3 x 64 x 64: 0.4 GB of training state, and activations that grow with the batch
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers import networks as peers
from benchmarks.streamed_networks import CLASSES

NAMES = (*peers.NAMES, "R")
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Of R: inner channels, bottlenecks, stride of the first of them."""
WIDER, SIDE = 4, 64


class Stem(nn.Module):
    """Digits (R, 64) to (R, 64, 16, 16): enlarged here, so that no arm holds the large images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = F.interpolate(x.unflatten(1, (1, 8, 8)), size=(SIDE, SIDE)).expand(-1, 3, -1, -1)
        return F.max_pool2d(F.relu(self.norm(self.conv(images)), inplace=True), 3, stride=2, padding=1)


class Bottleneck(nn.Module):
    """ResNet's, with the stride in the middle: (R, C, H, W) to (R, 4 x inner, H / stride, W / stride)."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = WIDER * inner
        self.reduce, self.norm1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv, self.norm2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.widen, self.norm3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        same = channels == out and stride == 1
        self.beside = (
            None if same else nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm1(self.reduce(x)), inplace=True)
        inner = F.relu(self.norm2(self.conv(inner)), inplace=True)
        found = self.norm3(self.widen(inner))
        found += x if self.beside is None else self.beside(x)
        return F.relu(found, inplace=True)


def _head(channels: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def resnet50() -> list[peers.Factory]:
    """The stem, 16 bottlenecks, the head. Equal blocks share a factory, so that seqpart measures them once."""
    made: list[peers.Factory] = [Stem]
    channels = 64
    for inner, count, stride in STAGES:
        made.append(functools.partial(Bottleneck, channels, inner, stride))
        channels = WIDER * inner
        made += [functools.partial(Bottleneck, channels, inner, 1)] * (count - 1)
    return [*made, functools.partial(_head, channels)]


def blocks_of(network: str) -> list[peers.Factory]:
    return resnet50() if network == "R" else peers.factories(network, peers.WIDTHS[network], peers.DEPTHS[network])


def rows_of(network: str, pixels: torch.Tensor, digits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, labels) from all digits: pixels (N, 64) from 0 to 16, in whatever type. T predicts the next pixel."""
    if network != "T":
        return (pixels / 16).to(torch.float32), digits.to(torch.int64)
    line = pixels.flatten().to(torch.int64)
    count = (len(line) - 1) // peers.CONTEXT
    x, y = (line[start : start + count * peers.CONTEXT].view(count, peers.CONTEXT) for start in (0, 1))
    return x, y
