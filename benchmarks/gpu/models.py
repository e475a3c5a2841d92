"""The contract grid's models as chains of blocks, built from torchvision's and GPT-2's published configurations, and rows for
them. Random weights and rows: what is measured is memory and time."""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torchvision.models.resnet import Bottleneck
from torchvision.models.vision_transformer import EncoderBlock

from seqpart.zoo.models import gpt

Blocks = list[Callable[[], nn.Module]]
Rows = tuple[torch.Tensor, torch.Tensor]

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Of ResNet-50: width, blocks, stride of the first."""
_VIT = {"num_heads": 12, "hidden_dim": 768, "mlp_dim": 3072, "dropout": 0.0, "attention_dropout": 0.0}
_TOKENS, _PATCHES = 1024, 196


def resnet50() -> Blocks:
    """25.6 M parameters; (rows, 3, 224, 224) to (rows, 1000)."""
    blocks: Blocks = [_stem]
    inputs = 64
    for width, count, stride in _STAGES:
        for number in range(count):
            blocks.append(functools.partial(_bottleneck, inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    return [*blocks, lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))]


def _stem() -> nn.Module:
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), pool)


def _bottleneck(inputs: int, width: int, stride: int) -> nn.Module:
    outputs = 4 * width
    shortcut = None
    if stride > 1 or inputs != outputs:
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))
    return Bottleneck(inputs, width, stride, shortcut)


class Patches(nn.Module):
    """Images (rows, 3, 224, 224) to tokens (rows, 197, 768): 16 x 16 patches behind a class token, with their places."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, 768, 16, stride=16)
        self.first = nn.Parameter(torch.zeros(1, 1, 768))
        self.place = nn.Parameter(torch.randn(1, 1 + _PATCHES, 768) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.project(x).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(x), -1, -1), patches], dim=1) + self.place


class Judge(nn.Module):
    """Class scores from the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(768, eps=1e-6), nn.Linear(768, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.norm(x)[:, 0])
        return scores


def vit_b16() -> Blocks:
    """86.6 M parameters; (rows, 3, 224, 224) to (rows, 1000)."""
    return [Patches, *[functools.partial(EncoderBlock, **_VIT)] * 12, Judge]


def gpt2_xl() -> Blocks:
    """GPT-2 XL's sizes with an output of its own (1.64 B parameters): 48 blocks of width 1600, 25 heads, 1,024 tokens."""
    return gpt(50257, _TOKENS, width=1600, depth=48, heads=25)


def images(count: int = 256) -> tuple[Rows, Rows]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(count, 3, 224, 224, generator=generator), torch.arange(count) % 10
    return (x, y), (x[:32], y[:32])


def texts(count: int = 8) -> tuple[Rows, Rows]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 50257, (count, _TOKENS + 1), generator=generator)
    return (text[:, :-1], text[:, 1:]), (text[:1, :-1], text[:1, 1:])
